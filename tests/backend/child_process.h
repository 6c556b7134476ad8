// Real processes in GTests: forked, observed, always reaped.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <utility>

namespace zeropg {

// Runs `body` in a forked child, whose exit status is 0 when `body` returned true. Killed at the latest when this
// object goes.
class ChildProcess {
 public:
  explicit ChildProcess(const std::function<bool()>& body) {
    std::fflush(nullptr);
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::alarm(60);  // a child that hangs does not outlive the test
    int status = 1;
    try {
      status = body() ? 0 : 1;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
    }
    ::_exit(status);
  }
  ChildProcess(ChildProcess&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  ChildProcess& operator=(ChildProcess&&) = delete;
  ~ChildProcess() {
    if (pid_ > 0) kill();
  }

  pid_t pid() const { return pid_; }
  void kill() {
    ::kill(pid_, SIGKILL);
    wait();
  }
  bool succeeded() {
    const int status = wait();
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

 private:
  int wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }

  pid_t pid_ = -1;
};

}  // namespace zeropg
