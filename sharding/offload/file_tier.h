// A file on a local disk, read and written past the page cache by a few threads.
//
// Source of the choice: plain pread/pwrite with O_DIRECT from 2 to 4 threads in large pieces is as fast on one disk as
// libaio or io_uring, which containers often forbid.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "sharding/offload/tier.h"

namespace zeropg {

struct FileTierOptions {
  std::string directory;  // must exist; any number of jobs and ranks may share it
  int64_t threads = 4;    // that read and write
  int64_t rank = 0;       // for messages
  int64_t world_size = 1;
};

// Makes a file without a name (Note [No name]), of mode 0600. TierError: the directory is missing, not a directory or
// not writable. The file grows by what is allocated, at once: a full disk is an error of allocate(), not of a step.
//
// Every result of every system call is looked at, a transfer that ends early is an error, and bytes that come back in
// the same range in which they were written are compared with a checksum kept in memory.
//
// O_DIRECT is given up, once and for the whole file, where the file system refuses it (describe() says so).
std::unique_ptr<Tier> make_file_tier(const FileTierOptions& options);

}  // namespace zeropg
