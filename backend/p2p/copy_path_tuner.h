// Which way a large message inside a node takes.
//
// Read from the sender's memory it is one copy, by the kernel, page by page; received over the ring it is two, but both
// ranks copy at the same time, and what lies between stays in their caches. Which is faster depends on the processor
// (how fast a core gets what another one wrote), on the size of the pages behind the tensors and on how many ranks
// share the CPUs: 64 MiB one way between two ranks of a Xeon took 10.0 ms and 8.6 ms, with pages of 2 MiB 7.2 and 8.6
// ms. So the receiver, who sees both, tries both, takes the faster one, and now and then tries the other one again.
#pragma once

#include <array>
#include <cstdint>

namespace zeropg {

enum class Path : uint8_t { kRead, kReceive };

// Of the messages from one rank. One thread at a time.
class CopyPathTuner {
 public:
  static constexpr int kTrials = 3;       // of each path, before one is preferred
  static constexpr int kRetryEvery = 32;  // messages, of which one takes the slower path

  Path next(uint64_t bytes);
  void note(Path path, uint64_t bytes, double seconds);  // from the receiver's answer to the last byte

 private:
  // Other work on the CPUs makes a message slower and nothing makes it faster, so the fastest of the latest counts.
  struct Record {
    std::array<double, kTrials> seconds_per_byte{};
    uint64_t count = 0;

    double fastest() const;
  };
  // Messages of about one size: what is best in the caches is not what is best beyond.
  struct SizeClass {
    std::array<Record, 2> records;
    uint64_t asked = 0;
  };
  SizeClass& class_of(uint64_t bytes);

  std::array<SizeClass, 6> classes_;  // up to 512 KiB, 2, 8, 32, 128 MiB, above
};

}  // namespace zeropg
