#include "backend/p2p/posted_receives.h"

#include <gtest/gtest.h>

#include <exception>

namespace zeropg {
namespace {

constexpr int32_t kAnybody = MessageRoute::kAnySource;

PostedMessage receive(int32_t peer, int32_t tag, uint64_t order) {
  PostedMessage posted;
  posted.message.route.peer = peer;
  posted.message.route.tag = tag;
  posted.order = order;
  return posted;
}

PostedReceives receives(std::initializer_list<std::pair<int32_t, int32_t>> peers_and_tags) {
  PostedReceives posted;
  uint64_t order = 0;
  for (const auto& [peer, tag] : peers_and_tags) posted.push(receive(peer, tag, ++order));
  return posted;
}

TEST(PostedReceives, GiveTheEarliestOfPeerAndTag) {
  PostedReceives posted = receives({{1, 5}, {2, 5}, {1, 6}, {1, 5}});
  EXPECT_EQ(posted.take(1, 6)->order, 3U);
  EXPECT_EQ(posted.take(1, 5)->order, 1U);
  EXPECT_EQ(posted.take(1, 5)->order, 4U);
  EXPECT_FALSE(posted.take(1, 5).has_value());
  EXPECT_EQ(posted.queue().size(), 1U);
}

TEST(PostedReceives, OfAnybodyCompeteWithNamedOnesByTheOrderOfTheCalls) {
  PostedReceives posted = receives({{kAnybody, 5}, {1, 5}, {kAnybody, 5}});
  EXPECT_EQ(posted.take(1, 5)->order, 1U);
  EXPECT_EQ(posted.take(1, 5)->order, 2U);
  EXPECT_EQ(posted.take(2, 5)->order, 3U);
}

TEST(PostedReceives, TakeTagsAsTheyAreAlsoNegativeOnes) {
  PostedReceives posted = receives({{1, -1}, {1, 0}});
  EXPECT_FALSE(posted.take(1, 1).has_value());
  EXPECT_EQ(posted.take(1, -1)->order, 1U);
}

TEST(PostedReceives, KnowFromWhomTheyWantAndWhomTheyName) {
  PostedReceives posted;
  EXPECT_FALSE(posted.wants_from(1));
  posted.push(receive(1, 5, 1));
  EXPECT_TRUE(posted.wants_from(1));
  EXPECT_TRUE(posted.names(1));
  EXPECT_FALSE(posted.wants_from(2));
  posted.push(receive(kAnybody, 5, 2));
  EXPECT_TRUE(posted.wants_from(2));
  EXPECT_FALSE(posted.names(2));
}

TEST(PostedReceives, LetGoOfThoseThatAreServedAndKeepTheOrderOfTheRest) {
  PostedReceives posted = receives({{1, 1}, {1, 2}, {1, 3}, {1, 4}});
  FinishedMessages finished;
  EXPECT_TRUE(posted.take_if([](const PostedMessage& each) { return each.message.route.tag % 2 == 0; }, finished));
  ASSERT_EQ(finished.size(), 2U);
  EXPECT_EQ(finished[0].first.order, 2U);
  EXPECT_EQ(finished[1].first.order, 4U);
  EXPECT_EQ(finished[0].second, nullptr);
  EXPECT_FALSE(posted.take_if([](const PostedMessage&) { return false; }, finished));
  EXPECT_EQ(posted.queue().front().order, 1U);
  EXPECT_EQ(posted.take_all().size(), 2U);
  EXPECT_TRUE(posted.queue().empty());
}

TEST(PostedReceives, KeepTheOneWhoseServiceFails) {
  PostedReceives posted = receives({{1, 1}, {1, 2}, {1, 3}});
  FinishedMessages finished;
  const auto serve = [](const PostedMessage& each) {
    if (each.message.route.tag == 2) throw std::runtime_error("another size");
    return true;
  };
  EXPECT_THROW(posted.take_if(serve, finished), std::runtime_error);
  EXPECT_EQ(finished.size(), 1U);
  EXPECT_EQ(posted.queue().size(), 2U);
}

}  // namespace
}  // namespace zeropg
