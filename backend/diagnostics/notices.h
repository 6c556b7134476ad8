// Lines for people: what this process has to do without, why, and what to do about it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace zeropg {

// Says `line` once per process and `kind` (a word per fall-back, such as "cma"). Any thread, also the progress thread:
// it needs no GIL and waits for nobody. The line goes to whoever listens, otherwise to stderr.
void notice(std::string_view kind, std::string line);

// A listener: `bell` is rung, on the thread that says something, after each line, which then waits for take_notices().
// It must not take the GIL. Null: nobody listens any more, and what still waits goes to stderr.
using NoticeBell = void (*)();
void set_notice_bell(NoticeBell bell);
std::vector<std::string> take_notices();

}  // namespace zeropg
