#include "runtime/comm/in_flight.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <set>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Clock = InFlight::Clock;

// Nobody looks at what handles point to.
template <typename T>
T* Handle(size_t place) {
  static std::array<char, 16> places;
  return reinterpret_cast<T*>(&places[place]);
}
CUevent_st* Event(size_t place) {
  return Handle<CUevent_st>(place);
}
CUstream_st* Queue(size_t place) {
  return Handle<CUstream_st>(place);
}
ncclComm* Comm(size_t place) {
  return Handle<ncclComm>(place);
}

Clock::time_point At(int second) {
  return Clock::time_point(std::chrono::seconds(second));
}

std::vector<CUevent_st*> TakeEnded(InFlight& in_flight,
                                   const std::set<CUevent_st*>& done,
                                   int second) {
  return in_flight
      .TakeEnded(
          [&](CUevent_st* event) -> Result<bool> {
            return done.contains(event);
          },
          At(second))
      .value();
}

TEST(InFlightTest, AStuckQueueHoldsUpNoOther) {
  InFlight in_flight;
  EXPECT_TRUE(in_flight.empty());
  EXPECT_EQ(in_flight.Oldest().operation, nullptr);
  in_flight.Add(Queue(0), {Comm(0), Event(0), "stuck"}, At(0));
  in_flight.Add(Queue(1), {Comm(1), Event(1), "first"}, At(1));
  in_flight.Add(Queue(1), {Comm(1), Event(2), "second"}, At(2));
  in_flight.Add(Queue(0), {Comm(0), Event(3), "behind"}, At(3));
  EXPECT_THAT(TakeEnded(in_flight, {Event(1)}, 4), ElementsAre(Event(1)));
  // It may have waited for what has ended in another queue.
  EXPECT_EQ(in_flight.Oldest().operation->what, "stuck");
  EXPECT_EQ(in_flight.Oldest().since, At(4));
  EXPECT_THAT(TakeEnded(in_flight, {}, 5), IsEmpty());
  EXPECT_EQ(in_flight.Oldest().since, At(4));
  EXPECT_THAT(TakeEnded(in_flight, {Event(0), Event(1)}, 5),
              ElementsAre(Event(0)));
  // It has been the first of its queue for longer than "behind".
  EXPECT_EQ(in_flight.Oldest().operation->what, "second");
  EXPECT_EQ(in_flight.Oldest().since, At(5));
  EXPECT_THAT(TakeEnded(in_flight, {Event(2), Event(3)}, 6),
              ElementsAre(Event(3), Event(2)));
  EXPECT_TRUE(in_flight.empty());
  in_flight.Add(Queue(1), {Comm(1), Event(4), "later"}, At(9));
  EXPECT_EQ(in_flight.Oldest().since, At(9));
}

TEST(InFlightTest, AnErrorIsOfItsOwnCommunicator) {
  InFlight in_flight;
  EXPECT_EQ(in_flight.WhatFailed(Comm(0)), "");
  in_flight.Add(Queue(0), {Comm(0), Event(0), "oldest"}, At(0));
  in_flight.Add(Queue(1), {Comm(0), Event(1), "between"}, At(1));
  in_flight.Add(Queue(1), {Comm(1), Event(2), "its own"}, At(2));
  in_flight.Add(Queue(0), {Comm(1), Event(3), "its second"}, At(3));
  EXPECT_EQ(in_flight.WhatFailed(Comm(1)), "its own");
  EXPECT_EQ(in_flight.WhatFailed(Comm(2)), "oldest");
}

TEST(InFlightTest, TakeAllAndErrors) {
  InFlight in_flight;
  in_flight.Add(Queue(0), {Comm(0), Event(0), "a"}, At(0));
  in_flight.Add(Queue(0), {Comm(0), Event(1), "b"}, At(0));
  const auto failed = in_flight.TakeEnded(
      [](CUevent_st*) -> Result<bool> { return InvalidInput("lost"); }, At(1));
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().message, "lost");
  // The event of what ended ahead of the failure is not lost.
  EXPECT_FALSE(in_flight.TakeEnded(
      [](CUevent_st* event) -> Result<bool> {
        if (event == Event(0)) return true;
        return InvalidInput("lost");
      },
      At(2)));
  EXPECT_THAT(in_flight.TakeAll(), ElementsAre(Event(0), Event(1)));
  EXPECT_THAT(in_flight.TakeAll(), IsEmpty());
}

}  // namespace
}  // namespace tessera
