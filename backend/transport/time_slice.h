// How long a thread may run before others of its CPU have their turn.
#pragma once

namespace zeropg {

// Note [Short slices]
// A thread that is woken waits for the time slice of whoever has its CPU, a millisecond and more, unless its own slice
// is shorter (Linux 6.12); and whoever yields gives the rest of its own slice away. Beside a busy process on each of
// two CPUs four ranks reduced 1 MiB in 10 ms with the kernel's slices and in 2 ms with short ones. A short slice takes
// no time of the CPU from others: it is had in more and smaller pieces.
//
// Makes that of the calling thread short, for good; its niceness stays, and threads and processes that it starts have
// the kernel's slices again. Does nothing where the kernel or the thread's policy has none, or forbids it.
void shorten_slice();

}  // namespace zeropg
