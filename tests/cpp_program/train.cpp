// Trains a small net from C++ and prints the loss of every step:
//   train <mode> <stage> <rank> <world size> <store file>
// Modes: plain (one process, no sharding, the whole batch), zeropg, bfloat16 (computed in it), foreign (over a backend
// that zeropg does not know), two_groups (the same, with a second group for gradients), limits (the same, with units
// that stay whole), rest (checks, no output).
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <zeropg/zeropg.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace {

constexpr int64_t kWidth = 19;  // odd, so that slices cut through rows
constexpr int64_t kBatch = 8;
constexpr int kSteps = 6;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 3 * width))),
        down(register_module("down", torch::nn::Linear(3 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
using Block = zeropg::ShardedUnit<BlockImpl>;

// Takes and returns more than one tensor.
struct MixImpl : torch::nn::Module {
  explicit MixImpl(int64_t width) : weight(register_parameter("weight", torch::ones({width}))) {}
  std::tuple<torch::Tensor, std::optional<torch::Tensor>> forward(const std::vector<torch::Tensor>& parts, bool twice) {
    const torch::Tensor sum = (parts.at(0) + parts.at(1)) * weight;
    return {twice ? sum + sum : sum, parts.at(1) * weight};
  }

  torch::Tensor weight;
};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width) {
    for (int i = 0; i < 3; ++i) {
      blocks->push_back(Block(width));
    }
    register_module("embed", embed);
    register_module("blocks", blocks);
    register_module("mix", mix);
    register_module("head", head);
    scale = register_buffer("scale", torch::full({1}, 0.5));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = blocks->forward(embed(x));
    const auto [mixed, rest] = mix->forward({y, torch::tanh(y)}, /*twice=*/true);
    return head(mixed + *rest) * scale;
  }

  torch::nn::Linear embed{torch::nn::LinearOptions(5, kWidth)};
  torch::nn::Sequential blocks;
  zeropg::ShardedUnit<MixImpl> mix{kWidth};
  torch::nn::Linear head{kWidth, 3};
  torch::Tensor scale;
};
TORCH_MODULE(Net);

// A backend of somebody else: sharding sees nothing but c10d's interface.
class Foreign : public c10d::Backend {
 public:
  explicit Foreign(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  const std::string getBackendName() const override { return "foreign"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return inner_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return inner_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    return inner_->_allgather_base(output, input, options);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    return inner_->_reduce_scatter_base(output, input, options);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
};

struct Batch {
  torch::Tensor inputs, targets;
};

// This rank's part of the batch of a step.
Batch make_batch(int step, int rank, int world_size) {
  torch::manual_seed(100 + step);
  const torch::Tensor inputs = torch::randn({kBatch, 5});
  const torch::Tensor targets = torch::stack({inputs.sum(1), inputs.prod(1), inputs.abs().amax(1)}, 1);
  const int64_t part = kBatch / world_size;
  return {inputs.narrow(0, rank * part, part), targets.narrow(0, rank * part, part)};
}

torch::optim::AdamWOptions adamw() { return torch::optim::AdamWOptions(1e-2).weight_decay(0.1); }

// Weight decay for matrices only.
std::vector<torch::optim::OptimizerParamGroup> groups_of(const torch::nn::Module& net) {
  std::vector<torch::Tensor> matrices, vectors;
  for (const auto& parameter : net.parameters()) {
    (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices);
  groups.emplace_back(vectors, std::make_unique<torch::optim::AdamWOptions>(adamw().weight_decay(0.0)));
  return groups;
}

void print_loss(int step, double loss) {
  std::printf("step %d loss %.9g\n", step, loss);
  std::fflush(stdout);
}

void train_plain() {
  torch::manual_seed(0);
  Net net(kWidth);
  torch::optim::AdamW optimizer(groups_of(*net), adamw());
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = make_batch(step, 0, 1);
    const torch::Tensor loss = torch::mse_loss(net->forward(batch.inputs), batch.targets);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
    optimizer.step();
    optimizer.zero_grad();
    print_loss(step, loss.item<double>());
  }
}

double mean_over_ranks(const c10::intrusive_ptr<c10d::Backend>& group, const torch::Tensor& value) {
  std::vector<torch::Tensor> tensors{value.detach().to(torch::kDouble).clone()};
  group->allreduce(tensors)->wait();
  return tensors[0].item<double>() / group->getSize();
}

// Throws unless reading a parameter of a block between steps throws, and names it.
void check_that_it_is_sharded(const NetImpl& net) {
  try {
    net.named_parameters()["blocks.1.up.weight"].sum().item<double>();
  } catch (const std::exception& error) {
    TORCH_CHECK(std::string(error.what()).find("blocks.1.up.weight") != std::string::npos, error.what());
    return;
  }
  TORCH_CHECK(false, "a sharded parameter could be read");
}

// The saved weights give a plain net the same loss.
double loss_of_plain_copy(const zeropg::StateDict& state) {
  torch::NoGradGuard no_grad;
  Net net(kWidth);
  for (auto& entry : net->named_parameters()) {
    entry.value().copy_(state[entry.key()]);
  }
  const Batch batch = make_batch(0, 0, 1);
  return torch::mse_loss(net->forward(batch.inputs), batch.targets).item<double>();
}

template <typename Function>
void expect_error(const std::string& words, Function&& function) {
  try {
    function();
  } catch (const std::exception& error) {
    TORCH_CHECK(std::string(error.what()).find(words) != std::string::npos, "expected '", words,
                "' in: ", error.what());
    return;
  }
  TORCH_CHECK(false, "nothing was thrown; expected '", words, "'");
}

// Slices are cut by the first group and reduced by the second.
void check_that_groups_must_fit(const c10::intrusive_ptr<c10d::Backend>& group,
                                const c10::intrusive_ptr<c10d::Store>& store) {
  const std::string name = "alone " + std::to_string(group->getRank());
  const auto alone = zeropg::make_process_group(c10::make_intrusive<c10d::PrefixStore>(name, store), 0, 1, {});
  expect_error("rank 0 of 1 in the reduction group; expected a group of the same ranks",
               [&] { zeropg::FullyShardedModule<Net>({.stage = 3, .reduction_group = alone}, group, kWidth); });
}

// Shards a net that exists, accumulates without communication, updates with SGD, loads: as the plain net does.
void check_the_rest(const c10::intrusive_ptr<c10d::Backend>& group, int64_t stage) {
  torch::manual_seed(0);
  Net plain(kWidth);
  torch::manual_seed(1 + group->getRank());
  Net net(kWidth);
  zeropg::FullyShardedModule<Net> model({.stage = stage}, group, *net);
  zeropg::StateDict start;
  for (const auto& entry : plain->named_parameters()) {
    start.insert(entry.key(), entry.value().detach().clone());
  }
  expect_error("'scale' is missing", [&] { model.load_full_state_dict(start); });
  start.insert("scale", plain->scale.clone());
  model.load_full_state_dict(start);
  TORCH_CHECK(net->parameters().front().is_same(model->parameters().front()), "parameters keep their identity");

  zeropg::ShardedOptimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD plain_optimizer(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto backward = [&](auto& net_of_either, int step, int rank, int world_size) {
    const Batch batch = make_batch(step, rank, world_size);
    torch::mse_loss(net_of_either->forward(batch.inputs), batch.targets).backward();
  };
  for (int step = 0; step < 4; step += 2) {
    model.no_sync([&] { backward(model, step, group->getRank(), group->getSize()); });
    expect_error("no_sync", [&] { optimizer.step(); });
    backward(model, step + 1, group->getRank(), group->getSize());
    optimizer.step();
    model->zero_grad();
    backward(plain, step, 0, 1);
    backward(plain, step + 1, 0, 1);
    plain_optimizer.step();
    plain_optimizer.zero_grad();
  }
  const zeropg::StateDict end = model.full_state_dict(torch::kDouble);
  for (const auto& entry : plain->named_parameters()) {
    if (group->getRank() == 0) {
      TORCH_CHECK(torch::allclose(end[entry.key()], entry.value().to(torch::kDouble), 1e-4, 1e-5), entry.key());
    }
  }

  start["scale"] = torch::ones({2});
  expect_error("'scale' has shape [2], expected [1]", [&] { model.load_full_state_dict(start); });
  expect_error("keep_numel is -1; expected a number",
               [&] { zeropg::FullyShardedModule<Net>({.stage = stage, .keep_numel = -1}, group, kWidth); });
  expect_error("reshard_after_forward = false", [&] {
    zeropg::FullyShardedModule<Net>({.stage = stage, .reshard_after_forward = false, .max_whole_numel = 9}, group,
                                    kWidth);
  });
  expect_error("another model or other options", [&] {
    zeropg::FullyShardedModule<Net>({.stage = stage, .keep_numel = group->getRank()}, group, kWidth);
  });
  expect_error("belongs to a sharded model already",
               [&] { zeropg::FullyShardedModule<Net>({.stage = stage}, group, *net); });
  if (stage == 3) {
    expect_error("is sharded", [&] { model->to(torch::kDouble); });
  } else {
    model->to(torch::kDouble);
    expect_error("changed after FullyShardedModule was made", [&] { model->forward(make_batch(0, 0, 1).inputs); });
  }
}

void train(const std::string& mode, int64_t stage, int rank, int world_size, const std::string& file) {
  const auto store = c10::make_intrusive<c10d::FileStore>(file, world_size);
  const auto make_group = [&](const std::string& name) -> c10::intrusive_ptr<c10d::Backend> {
    auto group = zeropg::make_process_group(c10::make_intrusive<c10d::PrefixStore>(name, store), rank, world_size,
                                            {.timeout = std::chrono::seconds(60)});
    if (mode == "zeropg" || mode == "bfloat16" || mode == "rest") {
      return group;
    }
    return c10::make_intrusive<Foreign>(group);
  };
  const auto group = make_group("first");
  if (mode == "rest") {
    check_the_rest(group, stage);
    check_that_groups_must_fit(group, store);
    return;
  }
  zeropg::FullyShardOptions options{.stage = stage};
  if (mode == "bfloat16") {
    options.param_dtype = torch::kBFloat16;
  }
  if (mode == "two_groups") {
    options.reduction_group = make_group("second");
  }
  if (mode == "limits") {
    options.prefetch_numel = 0;
    options.persistent_numel = kWidth;  // the unit `mix`
    options.keep_numel = 1 << 20;
    options.max_whole_numel = 6000;
  }
  torch::manual_seed(rank);  // rank 0's values count
  zeropg::FullyShardedModule<Net> model(options, group, kWidth);
  std::printf("fetch %s\n", model.core()->fetch_name().c_str());
  zeropg::ShardedOptimizer<torch::optim::AdamW> optimizer(model, groups_of(*model), adamw());
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = make_batch(step, rank, world_size);
    const torch::Tensor loss = torch::mse_loss(model->forward(batch.inputs).to(torch::kFloat), batch.targets);
    loss.backward();
    model.clip_grad_norm_(0.5);
    optimizer.step();
    optimizer.zero_grad();
    print_loss(step, mean_over_ranks(group, loss));
  }
  if (stage == 3) {
    check_that_it_is_sharded(*model);
  }

  const zeropg::StateDict state = model.full_state_dict();
  TORCH_CHECK(state.is_empty() == (rank != 0), "whole tensors belong to rank 0");
  if (rank == 0) {
    std::printf("plain copy %.9g\n", loss_of_plain_copy(state));
  }
  double sum = 0;
  model.full_parameters([&] { sum = model->named_parameters()["blocks.1.up.weight"].sum().item<double>(); });
  TORCH_CHECK(std::isfinite(sum));
  if (mode != "bfloat16") {
    torch::NoGradGuard no_grad;
    const Batch batch = make_batch(0, 0, 1);
    std::printf("sharded %.9g\n", torch::mse_loss(model->forward(batch.inputs), batch.targets).item<double>());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: %s mode stage rank world_size store_file\n", argv[0]);
    return 2;
  }
  at::set_num_threads(1);
  const std::string mode = argv[1];
  try {
    if (mode == "plain") {
      train_plain();
    } else {
      train(mode, std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), argv[5]);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
