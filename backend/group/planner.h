// From a request to what the engine runs: the algorithm's choice, its schedule, and the addresses of the tensors.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/collectives/reduce/reduce.h"
#include "backend/collectives/schedule/collective_spec.h"
#include "backend/collectives/schedule/schedule.h"
#include "backend/collectives/select/select.h"
#include "backend/group/call_fingerprint.h"
#include "backend/group/collective_args.h"
#include "backend/topology/link_model.h"
#include "backend/transport/shm/tensor_pool.h"

namespace zeropg {

// A planned request without its tensors: the progress thread must not own any (Note [Tensor references] in work.h).
struct PlannedCollective {
  std::shared_ptr<const Schedule> schedule;  // life shared with the planner's cache
  // What runs instead if the tensors of all ranks that it reaches lie in the group's pool; null: nothing does.
  std::shared_ptr<const Schedule> direct;
  int64_t copied_bytes = 0;     // at most, by this rank, in either
  bool has_shares = false;      // nodes complete their shares by the links, which may change: Planner::refresh
  uint64_t links_version = 0;   // by which it is planned
  bool offers_direct = false;   // those of this rank do
  bool may_read = false;        // whether this rank reads the memory of others, and lets them read its own
  bool offers_reading = false;  // its input is for that
  int64_t pool_input = -1;      // where its first input and output lie in its part of the pool; -1: not there
  int64_t pool_output = -1;
  CollectiveSpec spec;
  CallFingerprint call;  // but for its number
  DType dtype = DType::kUInt8;
  ReduceOp reduce_op = ReduceOp::kSum;
  std::complex<double> factor = 1;
  std::vector<std::byte*> inputs;
  std::vector<std::byte*> outputs;
  std::shared_ptr<NodeOutput> node_output;  // instead of outputs[0], where the direct schedule runs; or null
  Compression compression;                  // spec.codec is its codec
};

// What an algorithm would take by the group's model of its links.
struct AlgorithmEstimate {
  std::string algorithm;
  double time_us = 0;
  bool is_chosen = false;
};

struct PlannerOptions {
  int32_t rank = 0;
  int32_t world_size = 1;
  int64_t bank_bytes = 0;
  int64_t mailbox_bytes = 0;
  int64_t window_bytes = 0;
  bool cma = false;
  std::map<std::string, std::string> algorithms;  // operation -> forced algorithm
};

// Pure but for its cache of schedules. Any thread.
class Planner {
 public:
  // Throws ValueError naming the known ones when `algorithms` names an unknown operation or algorithm.
  explicit Planner(PlannerOptions options);

  // Which ranks share a node, known once the group has met. Before the first plan; empty: all of them.
  void set_nodes(std::vector<std::vector<int32_t>> nodes) { nodes_ = std::move(nodes); }
  // Which nodes share a rack (empty: none do), and what the links carry. After set_nodes, before the first plan.
  void set_links(std::vector<std::vector<int32_t>> racks, const LinkModel& links);
  // What a ring within a node holds: less than the user's mailbox_bytes where many ranks share a node. Before the first
  // plan, and the same on every rank.
  void set_rings(int64_t mailbox_bytes) { options_.mailbox_bytes = mailbox_bytes; }
  // Which of one node's ranks share a domain. Before the first plan; empty: there are none.
  void set_domains(std::vector<std::vector<int32_t>> domains) { domains_ = std::move(domains); }
  // Where tensors may lie that direct algorithms can reach. Before the first plan; must outlive the planner's use.
  void set_pool(const TensorPool& pool) { pool_ = &pool; }
  PlannedCollective plan(const CollectiveArgs& request);

  // The links now carry something else. Shares of nodes follow from now on. The choice between algorithms does not, nor
  // does anything that travels encoded: results would have other bits.
  void follow_links(const LinkModel& links);
  LinkModel links() const;  // as they are now
  // Plans anew what was planned before the links changed. To be called in the place that the collective has among the
  // group's, so that all ranks plan it by the same links.
  void refresh(PlannedCollective& collective);

  // Of all algorithms for an operation on fp32 tensors wherever they lie. `bytes` as in CollectiveSpec.
  std::vector<AlgorithmEstimate> estimates(OpKind op, int64_t bytes) const;

 private:
  struct Plan {
    std::shared_ptr<const Schedule> schedule;
    std::shared_ptr<const Schedule> direct;
    int64_t copied_bytes = 0;
    std::vector<int32_t> node_shares;
    bool has_shares = false;
    uint64_t links_version = 0;
    uint64_t hash = 0;  // CallFingerprint::algorithm
  };
  CollectiveSpec spec_of(const CollectiveArgs& request) const;
  std::string forced_for(OpKind op) const;  // empty: none is
  Plan plan_for(const CollectiveSpec& spec);
  Plan make_plan(const CollectiveSpec& spec, std::vector<int32_t> node_shares) const;
  static void adopt(Plan plan, PlannedCollective& collective);
  void offer_direct(PlannedCollective& collective, const CollectiveArgs& request) const;

  PlannerOptions options_;
  std::vector<std::vector<int32_t>> nodes_;
  std::vector<std::vector<int32_t>> racks_;
  std::vector<int32_t> first_shares_;  // by the links as they were when the group was made, as is model_
  CostModel model_;
  std::vector<std::vector<int32_t>> domains_;
  const TensorPool* pool_ = nullptr;
  mutable std::mutex mutex_;
  LinkModel links_;                             // guarded by mutex_, as are the next three
  std::vector<int32_t> node_shares_;            // by links_
  uint64_t links_version_ = 0;                  // counts their changes
  std::map<std::vector<int64_t>, Plan> cache_;  // of this version
  std::map<std::string, int64_t> codec_ids_;    // guarded by mutex_; by description
  size_t cached_bytes_ = 0;                     // guarded by mutex_
};

// Whether collectives can reduce this dtype with this operation.
bool is_reducible(at::ScalarType dtype, ReduceOp op);

}  // namespace zeropg
