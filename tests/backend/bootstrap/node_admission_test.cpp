// Strangers at the door of a group.
#include "backend/bootstrap/node_admission.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstring>
#include <optional>
#include <thread>

#include "backend/platform/process/doorbell.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;

const auto kNoTick = [](auto&&...) {};

class Admission : public ::testing::Test {
 protected:
  Admission() : place_{"zeropg-test-" + random_hex(16), "the secret"}, listener_(listen_unix(place_.name)) {}

  // Admits rank 1 while `strangers` do their worst; true when the rank got in well before the deadline.
  bool rank_gets_in(const std::function<void()>& strangers) {
    const auto deadline = deadline_after(milliseconds(20000));
    std::vector<Member> members;
    std::optional<AuthenticatedSocket> connection;
    {
      const std::jthread leader([&] {
        try {
          members = admit_members(listener_, place_, {1}, deadline, kNoTick);
        } catch (const c10::Error& error) {
          ADD_FAILURE() << error.what_without_backtrace();
        }
      });
      strangers();
      connection.emplace(join_leader(place_, 1, process_doorbell(), deadline, kNoTick));
    }
    return members.size() == 1 && members[0].rank == 1 && Clock::now() < deadline - milliseconds(10000);
  }

  Descriptor knock() { return connect_unix(place_.name, deadline_after(milliseconds(10000))); }

  // What the leader does with `bytes` sent as an answer to its challenge.
  Received reaction_to(std::string_view bytes) {
    const Descriptor socket = knock();
    const auto deadline = deadline_after(milliseconds(10000));
    receive_packet(socket, sizeof(Nonce), 0, deadline, kNoTick);
    send_packet(socket, bytes, {}, deadline);
    return wait_for_reaction(socket);
  }

  Received wait_for_reaction(const Descriptor& socket) {
    const auto deadline = deadline_after(milliseconds(10000));
    Packet packet;
    Received received = Received::kNothingYet;
    while (received == Received::kNothingYet && Clock::now() < deadline) {
      pollfd entry{socket.get(), POLLIN, 0};
      poll_until({&entry, 1}, deadline);
      received = try_receive(socket, 100, 0, &packet);
    }
    return received;
  }

  MeetingPlace place_;
  Descriptor listener_;
};

TEST_F(Admission, SilentStrangersDelayNobody) {
  std::vector<Descriptor> silent;
  EXPECT_TRUE(rank_gets_in([&] {
    for (int i = 0; i < 10; ++i) silent.push_back(knock());
  }));
}

TEST_F(Admission, MoreStrangersThanMayWaitDelayNobody) {
  std::vector<Descriptor> silent;
  EXPECT_TRUE(rank_gets_in([&] {
    for (int i = 0; i < 200; ++i) silent.push_back(knock());
  }));
}

TEST_F(Admission, GarbageIsDropped) {
  EXPECT_TRUE(rank_gets_in([&] {
    for (const size_t bytes : {1, 63, 64, 65, 4000}) {
      EXPECT_EQ(reaction_to(std::string(bytes, 'x')), Received::kClosed) << bytes;
    }
  }));
}

TEST_F(Admission, HangingUpIsHarmless) {
  EXPECT_TRUE(rank_gets_in([&] {
    for (int i = 0; i < 5; ++i) knock();
  }));
}

TEST_F(Admission, DescriptorsOfStrangersAreNotTaken) {
  EXPECT_TRUE(rank_gets_in([&] {
    const Descriptor socket = knock();
    const int fds[] = {0, 1, 2};
    send_packet(socket, std::string(64, 'x'), fds, deadline_after(milliseconds(10000)));
    receive_packet(socket, sizeof(Nonce), 0, deadline_after(milliseconds(10000)), kNoTick);
    EXPECT_EQ(wait_for_reaction(socket), Received::kClosed);
  }));
}

TEST_F(Admission, WrongSecretIsRefusedOnBothSides) {
  EXPECT_TRUE(rank_gets_in([&] {
    const MeetingPlace wrong{place_.name, "another secret"};
    try {
      join_leader(wrong, 1, process_doorbell(), deadline_after(milliseconds(10000)), kNoTick);
      ADD_FAILURE();
    } catch (const c10::DistNetworkError& error) {
      EXPECT_NE(std::string(error.what()).find("ZEROPG_SECRET"), std::string::npos);
    }
  }));
}

TEST_F(Admission, ReplayedProofFails) {
  EXPECT_TRUE(rank_gets_in([&] {
    // A proof that was right for another connection: the leader's nonce is another one here.
    ProofContext heard{place_.name, random_nonce(), random_nonce()};
    const Digest proof = prove(place_.key, Role::kMember, heard);
    const std::string replay =
        std::string(heard.member_nonce.begin(), heard.member_nonce.end()) + std::string(proof.begin(), proof.end());
    EXPECT_EQ(reaction_to(replay), Received::kClosed);
  }));
}

TEST_F(Admission, FalseLeaderIsNotBelieved) {
  std::thread impostor([&] {
    Descriptor socket;
    while (!socket) socket = accept_unix(listener_);
    const auto deadline = deadline_after(milliseconds(10000));
    send_packet(socket, std::string(sizeof(Nonce), 'n'), {}, deadline);
    const Packet proof = receive_packet(socket, 1000, 0, deadline, kNoTick);
    send_packet(socket, proof.bytes.substr(sizeof(Nonce)), {}, deadline);  // reflects the member's own proof
  });
  EXPECT_THROW(join_leader(place_, 1, process_doorbell(), deadline_after(milliseconds(10000)), kNoTick),
               c10::DistNetworkError);
  impostor.join();
}

TEST_F(Admission, RanksThatAreNotExpectedOrComeTwiceStayOutside) {
  EXPECT_TRUE(rank_gets_in([&] {
    for (const int32_t rank : {0, 2, -1}) {
      const AuthenticatedSocket connection =
          join_leader(place_, rank, process_doorbell(), deadline_after(milliseconds(10000)), kNoTick);
      EXPECT_EQ(wait_for_reaction(connection.socket()), Received::kClosed) << rank;
    }
  }));
}

TEST_F(Admission, DoorbellThatCouldBlockIsRefused) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const Descriptor reader(ends[0]);
  const Descriptor writer(ends[1]);
  EXPECT_TRUE(rank_gets_in([&] {
    const AuthenticatedSocket connection =
        join_leader(place_, 1, writer.get(), deadline_after(milliseconds(10000)), kNoTick);
    EXPECT_EQ(wait_for_reaction(connection.socket()), Received::kClosed);
  }));
}

TEST_F(Admission, DeadlineNamesWhoIsMissingAndWhoWasRefused) {
  const std::jthread stranger([&] {
    try {
      reaction_to("garbage");
    } catch (const c10::Error&) {
    }
  });
  try {
    admit_members(listener_, place_, {1, 5}, deadline_after(milliseconds(5000)), kNoTick);
    ADD_FAILURE();
  } catch (const c10::DistBackendError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("ranks 1, 5 did not connect"), std::string::npos) << text;
    EXPECT_NE(text.find("1 connections did not prove"), std::string::npos) << text;
  }
}

TEST(AuthenticatedSocket, MessagesCannotBeReplayedReorderedOrReflected) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, ends), 0);
  const Digest key = sha256("key");
  AuthenticatedSocket leader{Descriptor(ends[0]), Role::kLeader, key};
  const Descriptor raw(ends[1]);
  const auto deadline = deadline_after(milliseconds(1000));
  leader.send(MessageKind::kDescriptors, "one", {}, deadline);
  leader.send(MessageKind::kDescriptors, "two", {}, deadline);
  const Packet one = receive_packet(raw, 1000, 0, deadline, kNoTick);
  const Packet two = receive_packet(raw, 1000, 0, deadline, kNoTick);
  const auto verify = [](AuthenticatedSocket& connection, const std::string& bytes) {
    return connection.verify(Packet{bytes, {}}, MessageKind::kDescriptors).bytes;
  };
  AuthenticatedSocket member{Descriptor(), Role::kMember, key};
  EXPECT_THROW(verify(member, two.bytes), c10::DistNetworkError) << "reordered";
  EXPECT_THROW(verify(leader, one.bytes), c10::DistNetworkError) << "reflected";
  for (size_t i = 0; i < one.bytes.size(); ++i) {
    std::string changed = one.bytes;
    changed[i] ^= 1;
    EXPECT_THROW(verify(member, changed), c10::DistNetworkError);
    EXPECT_THROW(verify(member, one.bytes.substr(0, i)), c10::DistNetworkError);
  }
  EXPECT_EQ(verify(member, one.bytes), "one");
  EXPECT_THROW(verify(member, one.bytes), c10::DistNetworkError) << "replayed";
  EXPECT_EQ(verify(member, two.bytes), "two");
}

}  // namespace
}  // namespace zeropg
