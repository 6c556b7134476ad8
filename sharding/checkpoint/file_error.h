#pragma once

#include <stdexcept>
#include <string>

namespace zeropg {

// A failed system call on a file; OSError in Python.
class FileError : public std::runtime_error {
 public:
  FileError(const std::string& what, int code) : std::runtime_error(what), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

}  // namespace zeropg
