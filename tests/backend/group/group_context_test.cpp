// Groups that end while threads use them: Note [Use] in group_context.h. Ranks are threads.
#include "backend/group/group_context.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "backend/process_group/process_group.h"

namespace zeropg {
namespace {

using std::chrono::microseconds;
using Work = c10::intrusive_ptr<c10d::Work>;

constexpr int kRanks = 3;
constexpr int kRepetitions = 25;
constexpr std::chrono::seconds kTimeout{120};  // far more than a sanitizer takes: nothing here may time out

TEST(GroupUse, KeepsWhatTheGroupLetsGoOfUntilTheLastOneLeaves) {
  BootstrapOptions options;
  options.timeout = kTimeout;
  options.bank_bytes = 4096;
  options.mailbox_bytes = 1024;
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    auto group = std::make_shared<GroupContext>(bootstrap(nullptr, 0, 1, options), std::make_shared<Hooks>());
    const std::weak_ptr<TensorPool> pool = group->pool();
    std::atomic<int> inside{0};
    std::vector<std::thread> users;
    for (int i = 0; i < 3; ++i) {
      users.emplace_back([&] {
        bool is_first = true;
        for (GroupContext::Use use(*group, /*must_succeed=*/false); use; use.leave(), use.enter()) {
          group->peers().note_wait(Lane::kCollective, 0, {});
          EXPECT_EQ(group->arena().rank(), 0);
          EXPECT_GE(group->pool()->bytes_per_rank(), 0);
          if (std::exchange(is_first, false)) ++inside;
        }
      });
    }
    while (inside < 3) std::this_thread::yield();
    group->fail({.text = "the end"});
    auto stays = std::make_unique<GroupContext::Use>(*group);
    group->let_go();
    for (std::thread& user : users) user.join();
    EXPECT_FALSE(pool.expired());
    EXPECT_EQ(group->arena().state_of(0), RankState::kFailed);
    stays.reset();
    EXPECT_TRUE(pool.expired());
    EXPECT_THROW(GroupContext::Use{*group}, c10::DistBackendError);
  }
}

TEST(GroupAborted, StaysAbortedWhenItIsAbortedAgain) {
  const auto group = c10::make_intrusive<ProcessGroupZero>(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                                                           c10::make_intrusive<BackendOptions>(kTimeout));
  EXPECT_EQ(group->getError(), c10d::ErrorType::SUCCESS);
  group->abort();
  EXPECT_EQ(group->getError(), c10d::ErrorType::COMM_ERROR);
  group->abort();
  group->shutdown();
  EXPECT_EQ(group->getError(), c10d::ErrorType::COMM_ERROR);
}

// One rank and the threads of its program. All ranks make the same calls until their group ends.
class Rank {
 public:
  Rank(const c10::intrusive_ptr<c10d::Store>& store, int rank, bool has_nodes) : rank_(rank) {
    const auto options = c10::make_intrusive<BackendOptions>(kTimeout);
    options->bank_bytes = 16 << 10;
    options->mailbox_bytes = 4 << 10;
    options->window_bytes = 64 << 10;
    options->network = "tcp";
    options->host_id = has_nodes && rank == kRanks - 1 ? "another" : "one";
    group_ = c10::make_intrusive<ProcessGroupZero>(store, rank, kRanks, options);
    segment_ = group_->allocate_shared(64);
    start([this](int round) { reduce(round); });
    start([this](int round) { pass_on(round); });
    start([this](int) { ask(); });
    if (segment_ != nullptr) {
      start([this](int) { segment_->wait((segment_->rank() + 1) % segment_->world_size(), 0, 1, kTimeout, "test"); });
    }
  }

  void end_after(microseconds delay, const std::function<void(ProcessGroupZero&)>& end) {
    threads_.emplace_back([this, delay, end] {
      std::this_thread::sleep_for(delay);
      end(*group_);
    });
  }
  void join() {
    for (std::thread& thread : threads_) thread.join();
  }
  void drop_group() { group_.reset(); }
  std::vector<std::exception_ptr> take_errors() { return std::move(errors_); }  // one of each thread
  bool are_works_complete() const {
    return std::all_of(works_.begin(), works_.end(), [](const Work& work) { return work->isCompleted(); });
  }
  void wait_for_works() {
    for (const Work& work : works_) {
      try {
        work->wait();
      } catch (const c10::DistBackendError&) {
      }
    }
  }

 private:
  void start(const std::function<void(int round)>& call) {
    threads_.emplace_back([this, call] {
      try {
        for (int round = 0;; ++round) call(round);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex_);
        errors_.push_back(std::current_exception());
      }
    });
  }

  static at::Tensor make_ones(int64_t numel) {
    const at::Tensor ones = at::empty({numel}, at::kFloat);
    std::fill_n(ones.mutable_data_ptr<float>(), numel, 1.0F);
    return ones;
  }

  // Small and large ones; works that are waited for, that are kept, and that nobody keeps.
  void reduce(int round) {
    std::vector<at::Tensor> tensors{make_ones(round % 3 == 0 ? 100 : 20'000)};
    const Work work = group_->allreduce(tensors);
    if (round % 4 == 0) {
      work->wait();
      EXPECT_EQ(tensors[0].const_data_ptr<float>()[99], static_cast<float>(kRanks));
    } else if (round % 4 == 1) {
      works_.push_back(work);
    }
    if (round % 8 == 0) {
      c10d::BarrierOptions options;
      options.asyncOp = false;
      group_->barrier(options);
    }
  }

  void pass_on(int round) {
    std::vector<at::Tensor> to_next{make_ones(round % 3 == 0 ? 100 : 20'000)};
    std::vector<at::Tensor> from_last{at::empty_like(to_next[0])};
    const Work sent = group_->send(to_next, (rank_ + 1) % kRanks, round);
    const Work received = group_->recv(from_last, (rank_ + kRanks - 1) % kRanks, round);
    received->wait();
    EXPECT_EQ(from_last[0].const_data_ptr<float>()[99], 1.0F);
    if (round % 2 == 0) sent->wait();
  }

  void ask() {
    group_->check_peer("zeropg:test", (rank_ + 1) % kRanks);
    group_->supportsTensorAlloc(-1);
    group_->allocateTensor(100, at::kFloat);
    group_->statistics();
    group_->getError();
    std::this_thread::yield();
  }

  const int rank_;
  c10::intrusive_ptr<ProcessGroupZero> group_;
  std::shared_ptr<SharedSegment> segment_;
  std::vector<Work> works_;  // of the thread that reduces
  std::mutex mutex_;
  std::vector<std::exception_ptr> errors_;  // guarded by mutex_
  std::vector<std::thread> threads_;
};

std::vector<std::unique_ptr<Rank>> make_ranks(bool has_nodes) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Rank>> ranks(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] { ranks[rank] = std::make_unique<Rank>(store, rank, has_nodes); });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

void expect_end(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::DistBackendError& end) {
    const std::string_view text = end.what_without_backtrace();
    const bool is_end = text.find("aborted") != text.npos || text.find("shut down") != text.npos ||
                        text.find("left the group") != text.npos;
    EXPECT_TRUE(is_end) << text;
  }
}

// Groups go before their works, or with them.
void check_the_end(std::vector<std::unique_ptr<Rank>> ranks, bool drops_groups_first) {
  std::vector<std::exception_ptr> errors;
  for (const auto& rank : ranks) {
    rank->join();
    std::ranges::move(rank->take_errors(), std::back_inserter(errors));
  }
  if (drops_groups_first) {
    for (const auto& rank : ranks) rank->drop_group();
  }
  for (const auto& rank : ranks) {
    EXPECT_TRUE(!drops_groups_first || rank->are_works_complete());
    rank->wait_for_works();
  }
  ranks.clear();
  // ThreadSanitizer does not see how owners of an exception are counted: so the last one reads them.
  std::ranges::for_each(errors, expect_end);
}

class GroupInUse : public ::testing::TestWithParam<bool> {};

TEST_P(GroupInUse, EndsWhenAnotherThreadAbortsIt) {
  std::mt19937 random(7);
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    auto ranks = make_ranks(GetParam());
    const size_t first = random() % kRanks;
    ranks[first]->end_after(microseconds(random() % 5'000), &ProcessGroupZero::abort);
    for (const auto& rank : ranks) {
      if (random() % 2 == 0) rank->end_after(microseconds(random() % 5'000), &ProcessGroupZero::abort);
    }
    check_the_end(std::move(ranks), random() % 2 == 0);
  }
}

TEST_P(GroupInUse, EndsWhenAThreadAbortsItAndAnotherShutsItDown) {
  std::mt19937 random(8);
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    auto ranks = make_ranks(GetParam());
    for (const auto& rank : ranks) {
      const microseconds delay(random() % 5'000);
      rank->end_after(delay, &ProcessGroupZero::shutdown);
      rank->end_after(delay, &ProcessGroupZero::abort);
    }
    check_the_end(std::move(ranks), random() % 2 == 0);
  }
}

INSTANTIATE_TEST_SUITE_P(, GroupInUse, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "OnTwoNodes" : "OnOneNode"; });

}  // namespace
}  // namespace zeropg
