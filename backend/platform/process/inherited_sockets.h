// Sockets that a forked child must not keep: as long as any process holds one, the peer does not see that this one
// died.
#pragma once

namespace zeropg {

// From now on a fork of this process closes `fd` in the child. Call forget_in_children() before it is closed here.
void close_in_children(int fd);
void forget_in_children(int fd);

}  // namespace zeropg
