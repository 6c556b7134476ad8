// How long a thread may run before others of its CPU have their turn.
#pragma once

namespace zeropg {

// Note [Short slices]
// A thread that is woken waits for the time slice of whoever has its CPU, a millisecond and more, unless its own slice
// is shorter (Linux 6.12); and whoever yields gives the rest of its own slice away. Beside a busy process on each of
// two CPUs four ranks reduced 1 MiB in 10 ms with the kernel's slices and in 2 ms with short ones. A short slice takes
// no time of the CPU from others: it is had in more and smaller pieces.
//
// The progress thread has short ones for good, a thread of the program from its first long wait until a group of the
// process ends: to give them back after each wait would be to stand behind the busy process again (1 KiB among four
// ranks took two to three times as long). Its forked children and its signal handlers have the usual ones. What else it
// starts meanwhile has short ones too: only reset-on-fork would prevent that, which a process may set and not take
// back.
//
// None of this does anything where the kernel or the thread's policy has no slices, or forbids to set them. A thread's
// niceness stays as it is.

// The calling thread's, which is ours; what it starts has the kernel's slices.
void shorten_slice_for_good();

// The calling thread's, cheap where it is short already.
void shorten_slice();
bool has_short_slice();  // since shorten_slice()
void restore_slice();    // where that is so
void restore_slices();   // of all threads of this process

}  // namespace zeropg
