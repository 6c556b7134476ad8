#include "backend/group/planner.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <span>
#include <stdexcept>

#include "backend/collectives/schedule/direct.h"
#include "backend/collectives/schedule/schedule_cursor.h"
#include "backend/collectives/select/node_shares.h"
#include "backend/collectives/select/registry.h"
#include "backend/collectives/select/select.h"
#include "backend/transport/shm/cma.h"
#include "backend/transport/shm/node_output.h"

namespace zeropg {

namespace {

// A schedule takes kilobytes inside a node and up to some megabytes in a group of thousands of ranks; a training loop
// has tens of shapes.
constexpr size_t kLargestCacheBytes = 64 << 20;

std::optional<DType> reducible_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::ScalarType::Byte:
      return DType::kUInt8;
    case at::ScalarType::Char:
      return DType::kInt8;
    case at::ScalarType::Short:
      return DType::kInt16;
    case at::ScalarType::Int:
      return DType::kInt32;
    case at::ScalarType::Long:
      return DType::kInt64;
    case at::ScalarType::Half:
      return DType::kFloat16;
    case at::ScalarType::BFloat16:
      return DType::kBFloat16;
    case at::ScalarType::Float:
      return DType::kFloat32;
    case at::ScalarType::Double:
      return DType::kFloat64;
    case at::ScalarType::Bool:
      return DType::kBool;
    case at::ScalarType::ComplexFloat:
      return DType::kComplex64;
    case at::ScalarType::ComplexDouble:
      return DType::kComplex128;
    default:
      return std::nullopt;
  }
}

std::vector<std::byte*> output_addresses(const std::vector<at::Tensor>& tensors) {
  std::vector<std::byte*> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    result.push_back(static_cast<std::byte*>(tensor.mutable_data_ptr()));
  }
  return result;
}

// Asks for no write access, which tensors that are guarded against writes refuse; no schedule writes into an input
// that is not an output too.
std::vector<std::byte*> input_addresses(const std::vector<at::Tensor>& tensors) {
  std::vector<std::byte*> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    result.push_back(static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr())));
  }
  return result;
}

void check_forced(const std::string& op, const std::string& name) {
  std::string known;
  for (const Algorithm& algorithm : algorithms()) {
    if (op == traits_of(algorithm.op).name) {
      if (name == algorithm.name) {
        return;
      }
      known += (known.empty() ? "" : ", ") + std::string(algorithm.name);
    }
  }
  TORCH_CHECK_VALUE(!known.empty(), "[zeropg] BackendOptions: algorithms names the operation '", op,
                    "', which does not exist; use names like all_reduce, all_gather, reduce_scatter.");
  TORCH_CHECK_VALUE(false, "[zeropg] BackendOptions: algorithms[", op, "] is '", name, "', expected one of ", known,
                    ".");
}

uint64_t hash_of_schedule(const Schedule& schedule, std::span<const int32_t> shares) {
  std::string text(schedule.algorithm);
  text.append(reinterpret_cast<const char*>(shares.data()), shares.size_bytes());
  return hash_of(text);
}

// But for `algorithm`, which its plan has.
CallFingerprint fingerprint_of(const PlannedCollective& collective, const CollectiveArgs& request) {
  const CollectiveSpec& spec = collective.spec;
  return {.op = static_cast<uint32_t>(spec.op),
          .dtype = static_cast<uint32_t>(request.dtype),
          .reduce_op = static_cast<uint32_t>(collective.reduce_op),
          .root = spec.root,
          .bytes = spec.bytes,
          .factor = collective.factor.real(),
          .imaginary_factor = collective.factor.imag(),
          .codec = spec.codec == nullptr ? 0 : hash_of(spec.codec->description()),
          .item = request.item};
}

// A source of a reduction counts as a copy, as does each place that the result goes to as well.
int64_t copied_bytes(const Schedule& schedule) {
  int64_t bytes = 0;
  for (const Step& step : schedule.steps) {
    bytes += total_bytes(step) * (step.kind == StepKind::kReduce ? step.source_count + step.echo_count : 1);
  }
  return bytes;
}

}  // namespace

bool is_reducible(at::ScalarType dtype, ReduceOp op) {
  const std::optional<DType> known = reducible_dtype(dtype);
  return known.has_value() && is_supported(*known, op);
}

Planner::Planner(PlannerOptions options) : options_(std::move(options)) {
  for (const auto& [op, name] : options_.algorithms) {
    check_forced(op, name);
  }
}

void Planner::set_links(std::vector<std::vector<int32_t>> racks, const LinkModel& links) {
  links_ = links;
  if (racks.size() > 1) racks_ = std::move(racks);
  model_.node_bytes_per_us = links.node_bytes_per_us;
  model_.uplink_bytes_per_us = racks_.empty() ? std::vector<double>() : links.uplink_bytes_per_us;
  if (links.node_bytes_per_us.empty()) return;
  std::vector<double> speeds = links.node_bytes_per_us;
  std::nth_element(speeds.begin(), speeds.begin() + static_cast<ptrdiff_t>(speeds.size() / 2), speeds.end());
  model_.network_bytes_per_us = speeds[speeds.size() / 2];
  first_shares_ = node_shares(model_, nodes_);
  node_shares_ = first_shares_;
}

void Planner::follow_links(const LinkModel& links) {
  CostModel model;
  model.node_bytes_per_us = links.node_bytes_per_us;
  std::vector<int32_t> shares = node_shares(model, nodes_);
  const std::lock_guard<std::mutex> lock(mutex_);
  links_ = links;
  node_shares_ = std::move(shares);
  ++links_version_;
  cache_.clear();
  cached_bytes_ = 0;
}

LinkModel Planner::links() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return links_;
}

void Planner::refresh(PlannedCollective& collective) {
  if (!collective.has_shares) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (collective.links_version == links_version_) return;
  }
  collective.spec.node_shares = first_shares_;
  const int64_t copied_bytes = collective.copied_bytes;  // the queue counts with these
  adopt(plan_for(collective.spec), collective);
  collective.copied_bytes = copied_bytes;
}

CollectiveSpec Planner::spec_of(const CollectiveArgs& request) const {
  CollectiveSpec spec{
      .op = request.op,
      .rank = options_.rank,
      .world_size = options_.world_size,
      .root = request.root,
      .element_bytes = static_cast<int32_t>(c10::elementSize(request.dtype)),
      .bytes = request.bytes,
      .bank_bytes = options_.bank_bytes,
      .mailbox_bytes = options_.mailbox_bytes,
      .input_is_list = request.input_is_list,
      .output_is_list = request.output_is_list,
      .has_node_output = request.node_output != nullptr,
      .send_bytes = request.send_bytes,
      .receive_bytes = request.receive_bytes,
      .nodes = nodes_,
      .node_shares = first_shares_,
      .racks = racks_,
      .domains = domains_,
      .window_bytes = options_.window_bytes,
      .codec = request.compression.codec.get(),
      .has_residuals = request.compression.residuals != nullptr,
  };
  if (traits_of(request.op).is_reducing) {
    const DType dtype = reducible_dtype(request.dtype).value();
    spec.accumulator_bytes = static_cast<int32_t>(element_bytes(accumulator_dtype(dtype)));
  }
  return spec;
}

std::string Planner::forced_for(OpKind op) const {
  const auto found = options_.algorithms.find(traits_of(op).name);
  return found == options_.algorithms.end() ? std::string() : found->second;
}

std::vector<AlgorithmEstimate> Planner::estimates(OpKind op, int64_t bytes) const {
  CollectiveArgs request;
  request.op = op;
  request.dtype = at::ScalarType::Float;
  request.bytes = bytes;
  if (traits_of(op).has_counts) {
    request.send_bytes.assign(static_cast<size_t>(options_.world_size), bytes);
    request.receive_bytes = request.send_bytes;
  }
  const CollectiveSpec spec = spec_of(request);
  const Algorithm& chosen = select_algorithm(spec, forced_for(op), model_);
  std::vector<AlgorithmEstimate> result;
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.op != op || algorithm.is_direct || !algorithm.supports(spec)) continue;
    // A group of one rank has no staging that a cost could be computed from.
    const double time_us = spec.world_size == 1 ? 0 : estimate_us(algorithm.cost(spec), model_);
    result.push_back({std::string(algorithm.name), time_us, &algorithm == &chosen});
  }
  return result;
}

PlannedCollective Planner::plan(const CollectiveArgs& request) {
  PlannedCollective collective;
  collective.spec = spec_of(request);
  collective.may_read = options_.cma;
  if (traits_of(request.op).is_reducing) {
    collective.dtype = reducible_dtype(request.dtype).value();
    collective.reduce_op = request.reduce_op;
    collective.factor =
        request.reduce_op == ReduceOp::kAverage ? std::complex<double>(options_.world_size) : request.factor;
  }
  collective.call = fingerprint_of(collective, request);
  adopt(plan_for(collective.spec), collective);
  collective.inputs = input_addresses(request.inputs);
  collective.outputs = output_addresses(request.outputs);
  collective.node_output = request.node_output;
  collective.compression = request.compression;
  if (collective.direct != nullptr) {
    offer_direct(collective, request);
  }
  return collective;
}

void Planner::adopt(Plan plan, PlannedCollective& collective) {
  collective.schedule = std::move(plan.schedule);
  collective.direct = std::move(plan.direct);
  collective.copied_bytes = plan.copied_bytes;
  collective.call.algorithm = plan.hash;
  collective.spec.node_shares = std::move(plan.node_shares);
  collective.has_shares = plan.has_shares;
  collective.links_version = plan.links_version;
}

void Planner::offer_direct(PlannedCollective& collective, const CollectiveArgs& request) const {
  const auto offset_of = [&](const std::vector<std::byte*>& addresses, const std::vector<at::Tensor>& tensors) {
    return addresses.empty() ? -1 : pool_->offset_of(addresses[0], static_cast<int64_t>(tensors[0].nbytes()));
  };
  collective.pool_input = offset_of(collective.inputs, request.inputs);
  collective.pool_output = request.node_output == nullptr
                               ? offset_of(collective.outputs, request.outputs)
                               : pool_->offset_of(request.node_output->data(), shared_output_bytes(collective.spec));
  const SharedTensors shared = shared_tensors(collective.spec, collective.spec.rank);
  collective.offers_direct =
      (!shared.input || collective.pool_input >= 0) && (!shared.output || collective.pool_output >= 0);
  collective.offers_reading = collective.may_read && shared.input && !collective.offers_direct &&
                              pays_to_read(collective.spec) &&
                              is_readable({collective.inputs[0], static_cast<size_t>(request.inputs[0].nbytes())});
}

Planner::Plan Planner::plan_for(const CollectiveSpec& spec) {
  std::vector<int64_t> key{
      static_cast<int64_t>(spec.op),
      spec.root,
      spec.element_bytes,
      spec.accumulator_bytes,
      spec.bytes,
      (spec.input_is_list ? 1 : 0) + (spec.output_is_list ? 2 : 0) + (spec.has_node_output ? 4 : 0)};
  key.insert(key.end(), spec.send_bytes.begin(), spec.send_bytes.end());
  key.insert(key.end(), spec.receive_bytes.begin(), spec.receive_bytes.end());
  uint64_t links_version = 0;
  std::vector<int32_t> shares;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (spec.codec != nullptr) {
      const auto next_id = static_cast<int64_t>(codec_ids_.size());
      key.push_back(codec_ids_.try_emplace(spec.codec->description(), next_id).first->second);
      key.push_back(spec.has_residuals ? 1 : 0);
    } else {
      links_version = links_version_;
    }
    if (auto found = cache_.find(key); found != cache_.end()) {
      return found->second;
    }
    shares = spec.codec != nullptr ? first_shares_ : node_shares_;
  }
  Plan plan = make_plan(spec, std::move(shares));
  plan.links_version = links_version;
  const size_t bytes =
      memory_bytes(*plan.schedule) + (plan.direct ? memory_bytes(*plan.direct) : 0) + key.size() * sizeof(key[0]);
  std::lock_guard<std::mutex> lock(mutex_);
  if (spec.codec == nullptr && links_version != links_version_) return plan;
  if (cached_bytes_ + bytes > kLargestCacheBytes) {
    cache_.clear();
    cached_bytes_ = 0;
  }
  cached_bytes_ += bytes;
  cache_.emplace(std::move(key), plan);
  return plan;
}

// The choice is by the first links, the shares by those of now (Planner::follow_links).
Planner::Plan Planner::make_plan(const CollectiveSpec& spec, std::vector<int32_t> node_shares) const {
  const std::string forced = forced_for(spec.op);
  Plan plan;
  try {
    const Algorithm& algorithm = select_algorithm(spec, forced, model_);
    CollectiveSpec divided = spec;
    divided.node_shares = std::move(node_shares);
    plan.schedule = std::make_shared<const Schedule>(algorithm.plan(divided));
    plan.has_shares = algorithm.uses_shares && spec.codec == nullptr;
    plan.node_shares = std::move(divided.node_shares);
    plan.hash = hash_of_schedule(*plan.schedule, plan.has_shares ? plan.node_shares : std::span<const int32_t>());
    const bool has_pool = pool_ != nullptr && pool_->bytes_per_rank() > 0;
    const bool can_reach = has_pool || (options_.cma && pays_to_read(spec));
    if (const Algorithm* direct = can_reach ? select_direct_algorithm(spec, forced, model_) : nullptr) {
      plan.direct = std::make_shared<const Schedule>(direct->plan(spec));
    }
    plan.copied_bytes = std::max(copied_bytes(*plan.schedule), plan.direct ? copied_bytes(*plan.direct) : 0);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, "[zeropg rank ", spec.rank, "/", spec.world_size, "] ", traits_of(spec.op).name, ": ",
                      error.what());
  }
  return plan;
}

}  // namespace zeropg
