// A parameter keeps its identity while its memory comes and goes, and cannot be read while it is gone.
#include "sharding/parameters/parameter_storage.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace zeropg {
namespace {

template <typename Function>
std::string message_of(Function&& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

TEST(ParameterStorage, ReadsWhatItIsAttachedTo) {
  at::Tensor parameter = at::ones({2, 3});
  at::Tensor view = parameter.t();
  ParameterStorage storage(parameter, at::kFloat, "gone");
  const at::Tensor flat = at::arange(10, at::kFloat);
  storage.attach(flat, 4, /*is_watched=*/false);
  EXPECT_TRUE(storage.is_attached());
  EXPECT_TRUE(at::equal(parameter, flat.narrow(0, 4, 6).view({2, 3})));
  parameter.fill_(-1);
  EXPECT_EQ(flat[4].item<float>(), -1);
  EXPECT_EQ(flat[3].item<float>(), 3);
  EXPECT_TRUE(at::equal(view, at::ones({3, 2}))) << "a view from before keeps the old data";
}

TEST(ParameterStorage, ThrowsWhileDetachedAlsoThroughViews) {
  at::Tensor parameter = at::ones({2, 3});
  ParameterStorage storage(parameter, at::kFloat, "gone to other ranks");
  const at::Tensor view = parameter.t();
  for (int round = 0; round < 2; ++round) {
    for (const auto& read : std::vector<std::function<void()>>{[&] { parameter.add(1); }, [&] { parameter.clone(); },
                                                               [&] { parameter.zero_(); }, [&] { view.sum(); },
                                                               [&] {
                                                                 at::empty({2, 3}).copy_(parameter);
                                                               },
                                                               [&] { parameter.data_ptr<float>(); }}) {
      EXPECT_NE(message_of(read).find("gone to other ranks"), std::string::npos) << message_of(read);
    }
    EXPECT_EQ(parameter.sizes(), at::IntArrayRef({2, 3}));
    EXPECT_EQ(parameter.nbytes(), 24);
    storage.attach(at::zeros({6}), 0, /*is_watched=*/round == 0);
    EXPECT_EQ(view.sum().item<float>(), 0);
    storage.detach();
  }
}

TEST(ParameterStorage, AsksBeforeTheFirstWriteToWatchedMemory) {
  at::Tensor parameter = at::ones({4});
  ParameterStorage storage(parameter, at::kFloat, "gone");
  const at::Tensor flat = at::arange(4, at::kFloat);
  int asked = 0;
  bool refuses = true;
  storage.set_before_write([&] {
    ++asked;
    TORCH_CHECK(!refuses, "read only, please");
    return target_in(flat, 0);
  });
  storage.attach(flat, 0, /*is_watched=*/true);
  EXPECT_EQ(parameter.sum().item<float>(), 6);
  EXPECT_EQ(asked, 0) << "reading is free";
  for (int round = 1; round <= 3; ++round) {
    EXPECT_NE(message_of([&] { parameter.zero_(); }).find("read only, please"), std::string::npos);
    EXPECT_EQ(asked, round) << "a refused write is asked for again";
  }
  EXPECT_EQ(flat.sum().item<float>(), 6);
  refuses = false;
  parameter.fill_(2);
  parameter.fill_(3);
  EXPECT_EQ(asked, 4) << "one that is allowed is not";
  EXPECT_EQ(flat.sum().item<float>(), 12);
  storage.attach(flat, 0, /*is_watched=*/true);
  parameter.detach().view({2, 2}).zero_();
  EXPECT_EQ(asked, 5) << "views are the same storage";
  storage.attach(flat, 0, /*is_watched=*/false);
  parameter.zero_();
  EXPECT_EQ(asked, 5);
}

TEST(ParameterStorage, MayWriteElsewhere) {
  at::Tensor parameter = at::ones({4});
  ParameterStorage storage(parameter, at::kFloat, "gone");
  const at::Tensor flat = at::arange(4, at::kFloat);
  const at::Tensor copy = flat.clone();
  storage.set_before_write([&] { return target_in(copy, 0); });
  storage.attach(flat, 0, /*is_watched=*/true);
  parameter.add_(1);
  EXPECT_EQ(parameter.sum().item<float>(), 10) << "whoever wrote reads what it wrote";
  EXPECT_EQ(flat.sum().item<float>(), 6);
  EXPECT_TRUE(storage.is_used_by(parameter));
}

TEST(ParameterStorage, IsLeftAloneByWritesAfterItsEnd) {
  at::Tensor parameter = at::ones({4});
  const at::Tensor flat = at::arange(4, at::kFloat);
  {
    ParameterStorage storage(parameter, at::kFloat, "gone");
    storage.set_before_write([]() -> WatchedStorage::Target { TORCH_CHECK(false, "must not be asked"); });
    storage.attach(flat, 0, /*is_watched=*/true);
  }
  parameter.zero_();
  EXPECT_EQ(flat.sum().item<float>(), 0);
}

TEST(MakeReadOnly, CanBeReadAndNotWritten) {
  at::Tensor values = at::arange(4, at::kFloat);
  const at::Tensor view = make_read_only(values, "write elsewhere", [](WatchedStorage&) {});
  EXPECT_EQ(view.sum().item<float>(), 6);
  EXPECT_NE(message_of([&] { view.zero_(); }).find("write elsewhere"), std::string::npos);
  values.fill_(2);
  EXPECT_EQ(view.sum().item<float>(), 8) << "it is live";
}

TEST(MakeReadOnly, GivesRawPointersAndSaysSo) {
  at::Tensor values = at::arange(4, at::kFloat);
  WatchedStorage* told = nullptr;
  const at::Tensor view = make_read_only(values, "write elsewhere", [&](WatchedStorage& storage) { told = &storage; });
  EXPECT_EQ(view.mutable_data_ptr(), values.mutable_data_ptr());
  ASSERT_EQ(told, view.storage().unsafeGetStorageImpl());
  view.zero_();
  EXPECT_EQ(values.sum().item<float>(), 0) << "what comes after the pointer may be seen through it";
  told->refuse_writes_again();
  EXPECT_NE(message_of([&] { view.fill_(1); }).find("write elsewhere"), std::string::npos);
}

TEST(ParameterStorage, KeepsTheFlatBufferAlive) {
  at::Tensor parameter = at::ones({4});
  ParameterStorage storage(parameter, at::kFloat, "gone");
  storage.attach(at::full({8}, 5.0), 2, /*is_watched=*/false);
  EXPECT_EQ(parameter.sum().item<float>(), 20);
}

TEST(ParameterStorage, ChangesTheDtypeAndNoticesReplacedData) {
  at::Tensor parameter = at::ones({4});
  ParameterStorage storage(parameter, at::kBFloat16, "gone");
  EXPECT_EQ(parameter.scalar_type(), at::kBFloat16);
  storage.attach(at::zeros({4}, at::kBFloat16), 0, /*is_watched=*/false);
  EXPECT_TRUE(storage.is_used_by(parameter));
  parameter.set_data(at::zeros({4}));
  EXPECT_FALSE(storage.is_used_by(parameter));
  storage.take_back(parameter);
  EXPECT_TRUE(storage.is_used_by(parameter));
}

TEST(ParameterStorage, IsRecognisedOnOtherTensors) {
  at::Tensor parameter = at::ones({4});
  EXPECT_FALSE(is_sharded(parameter));
  ParameterStorage storage(parameter, at::kFloat, "gone");
  EXPECT_TRUE(is_sharded(parameter));
  storage.attach(at::zeros({4}), 0, /*is_watched=*/false);
  EXPECT_TRUE(is_sharded(parameter));
  EXPECT_FALSE(is_sharded(parameter.clone()));
}

TEST(MakeUnreadable, HasAShapeAndNoData) {
  const at::Tensor gradient = make_unreadable({3, 5}, at::TensorOptions().dtype(at::kBFloat16), "clip elsewhere");
  EXPECT_EQ(gradient.sizes(), at::IntArrayRef({3, 5}));
  EXPECT_EQ(gradient.scalar_type(), at::kBFloat16);
  EXPECT_NE(message_of([&] { gradient.norm(); }).find("clip elsewhere"), std::string::npos);
  EXPECT_NE(message_of([&] { gradient.detach().mul_(2); }).find("clip elsewhere"), std::string::npos);
}

}  // namespace
}  // namespace zeropg
