// What encodings have lost so far and the next ones make up for (error feedback: Seide et al., "1-Bit Stochastic
// Gradient Descent", section 3; Karimireddy et al., "Error Feedback Fixes SignSGD").
//
// Residuals belong to elements of named data, such as a parameter, never to a bucket or a message: those change between
// steps, worlds and processes. Only the ranges that this rank encodes take memory, 4 bytes per element and hop.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeropg {

// Which encoding on the way of a reduction a residual belongs to.
enum ResidualHop : int32_t {
  kContributionHop = 0,  // what a rank (or a node, of its sum) contributes; in units of the sum
  kResultHop = 1,        // what the owner of a range sends back: in units of the result (the average)
  // None: what was lost where this rank encodes no more, after a change of buckets, of the codec, or of ranks and
  // nodes. Somebody adds it, as it is, to what this rank contributes next; in units of the sum.
  kArrearsHop = 2,
};

struct ElementRange {
  int64_t start = 0;
  int64_t stop = 0;
};

// A stretch of the residuals of one (name, hop): elements [start, start + values->size()) of what `name` names.
struct ResidualSegment {
  std::string name;
  int32_t hop = kContributionHop;
  int64_t start = 0;
  std::shared_ptr<std::vector<float>> values;  // life shared with the store and with operations that run
};

// The residuals of one model on one rank. Any thread; but the values inside a segment belong to the operation that runs
// on their range, so they are read, loaded or scaled between steps only.
class ResidualStore {
 public:
  // The segments that together cover elements [start, stop), in order; zeros where there was nothing. The first and the
  // last may reach beyond. A segment never moves or grows.
  std::vector<ResidualSegment> reserve(const std::string& name, int32_t hop, int64_t start, int64_t stop);

  // All of them, by name, hop and start.
  std::vector<ResidualSegment> segments() const;

  // Sets elements [start, start + values.size()). std::invalid_argument for values that are not finite: they would
  // spoil every later step.
  void load(const std::string& name, int32_t hop, int64_t start, std::span<const float> values);

  // Adds to the arrears of elements [start, start + values.size()). std::invalid_argument as load.
  void owe(const std::string& name, int64_t start, std::span<const float> values);

  // What lies in elements [start, stop) of (name, hop) and outside of `kept` (ascending, disjoint) becomes arrears,
  // multiplied by `factor`: nobody encodes those elements at that hop any more.
  void retire(const std::string& name, int32_t hop, int64_t start, int64_t stop, std::span<const ElementRange> kept,
              float factor);
  bool has_arrears() const;

  // Removes what there is of one (name, hop), and returns it.
  std::vector<ResidualSegment> take(const std::string& name, int32_t hop);

  // Multiplies everything, e.g. by new scale / old scale when the loss is scaled by another factor than before.
  // std::invalid_argument for a factor that is not finite and above 0.
  void scale(float factor);
  void clear();  // forgets everything

  int64_t bytes() const;

 private:
  using Key = std::pair<std::string, int32_t>;
  using Segments = std::map<int64_t, std::shared_ptr<std::vector<float>>>;  // by start; they do not overlap

  // Sets each value to changed(known, values[i]).
  template <typename Function>
  void change(const std::string& name, int32_t hop, int64_t start, std::span<const float> values, Function&& changed);

  mutable std::mutex mutex_;
  std::map<Key, Segments> segments_;  // guarded by mutex_
};

}  // namespace zeropg
