#include "planner/lower/staging.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

// Two ranks in one axis, and one rank alone.
const DeviceGroup kPair = {"pair", {DeviceId(0), DeviceId(1)}, {{"a", 2}}};
const DeviceGroup kSingle = {"single", {DeviceId(2)}, {}};

// A 4 x 6 tensor of fp32: 96 bytes.
Value Tensor4x6(Layout layout) {
  Value value;
  value.shape = {4, 6};
  value.layout = layout;
  return value;
}

Layout Rows() {
  Layout layout;
  layout.dims[0] = 1;
  return layout;
}
Layout Columns() {
  Layout layout;
  layout.dims[1] = 1;
  return layout;
}
Layout Runs() {
  Layout layout;
  layout.flat = 1;
  return layout;
}

int64_t Staged(CommKind kind, int tensors, Layout from, Layout to) {
  const std::vector<Value> values = {Tensor4x6(from), Tensor4x6(to)};
  Task task;
  task.kind = TaskKind::kComm;
  task.comm = kind;
  task.axes = 1;
  task.reads.assign(static_cast<size_t>(tensors), ValueId(0));
  task.writes.assign(static_cast<size_t>(tensors), ValueId(1));
  return StagingBytes(task, values, kPair, nullptr, nullptr).value;
}

TEST(Staging, AllReduce) {
  EXPECT_EQ(Staged(CommKind::kAllReduce, 1, {}, {}), 0);
  EXPECT_EQ(Staged(CommKind::kAllReduce, 3, {}, {}), 3 * 96);
}

// Rows and runs of a row-major block follow one another, columns do not.
TEST(Staging, ReduceScatter) {
  EXPECT_EQ(Staged(CommKind::kReduceScatter, 1, {}, Rows()), 0);
  EXPECT_EQ(Staged(CommKind::kReduceScatter, 1, {}, Runs()), 0);
  EXPECT_EQ(Staged(CommKind::kReduceScatter, 1, {}, Columns()), 96);
  // Two tensors are packed, and unpacked from what is received.
  EXPECT_EQ(Staged(CommKind::kReduceScatter, 2, {}, Runs()), 2 * (96 + 48));
}

TEST(Staging, AllGather) {
  EXPECT_EQ(Staged(CommKind::kAllGather, 1, Rows(), {}), 0);
  EXPECT_EQ(Staged(CommKind::kAllGather, 1, Columns(), {}), 96);
  EXPECT_EQ(Staged(CommKind::kAllGather, 2, Rows(), {}), 2 * (48 + 96));
}

// Half a tensor is sent and half received.
TEST(Staging, AllToAll) {
  EXPECT_EQ(Staged(CommKind::kAllToAll, 1, Rows(), Columns()), 48 + 48);
}

// Rows in two halves (of two axes the inner one), each on two ranks, to columns
// in halves along the outer axis. Rank r of 0 to 3 wants its columns from its
// own rows and from the first of the others, counted from itself, that has the
// other half: 0 from 1, 1 from 2, 2 from 3, 3 from 0. With the outer axis on
// the rows 0 wants the second half from 2, 1 from 2, too; 2 and 3 want the
// first from 0. So 0 and 2 send three pieces of 2 x 3 fp32, 24 bytes, their own
// included, and 1 and 3 only their own; each receives two.
TEST(Staging, ReplicasSendForOthers) {
  const DeviceGroup four = {
      "four",
      {DeviceId(0), DeviceId(1), DeviceId(2), DeviceId(3)},
      {{"a", 2}, {"b", 2}}};
  const auto staged = [&](AxisSet rows, AxisSet columns,
                          std::optional<int> position) {
    Layout from;
    from.dims[0] = rows;
    Layout to;
    to.dims[1] = columns;
    const std::vector<Value> values = {Tensor4x6(from), Tensor4x6(to)};
    Task task;
    task.kind = TaskKind::kComm;
    task.comm = CommKind::kRedistribute;
    task.axes = 3;
    task.reads = {ValueId(0)};
    task.writes = {ValueId(1)};
    return StagingBytes(task, values, four, nullptr, nullptr, position).value;
  };
  EXPECT_EQ(staged(2, 1, {}), 4 * 24);
  EXPECT_EQ(staged(2, 1, 1), 4 * 24);
  EXPECT_EQ(staged(1, 2, {}), 5 * 24);
  EXPECT_EQ(staged(1, 2, 0), 5 * 24);
  EXPECT_EQ(staged(1, 2, 1), 3 * 24);
}

// The root packs the whole and its own half, or unpacks them; what it
// broadcasts, or reduces, lies in order.
TEST(Staging, Rooted) {
  Layout rooted;
  rooted.rooted = 1;
  EXPECT_EQ(Staged(CommKind::kScatter, 1, rooted, Rows()), 96 + 48);
  EXPECT_EQ(Staged(CommKind::kGather, 1, Rows(), rooted), 48 + 96);
  EXPECT_EQ(Staged(CommKind::kBroadcast, 1, rooted, {}), 0);
  EXPECT_EQ(Staged(CommKind::kBroadcast, 2, rooted, {}), 2 * (96 + 96));
  Layout partial;
  partial.partial = 1;
  EXPECT_EQ(Staged(CommKind::kReduce, 1, partial, rooted), 0);
  EXPECT_EQ(Staged(CommKind::kReduce, 2, partial, rooted), 2 * (96 + 96));
}

// Thirds of six columns from halves: the second third, columns 2 and 3, comes
// in two pieces of 4 x 1. Thirds of the rows would be whole runs.
TEST(Staging, TransfersOfUnlikeCuts) {
  const DeviceGroup three = {
      "three", {DeviceId(2), DeviceId(3), DeviceId(4)}, {{"a", 3}}};
  const std::vector<Value> values = {Tensor4x6(Columns()),
                                     Tensor4x6(Columns())};
  Task receive;
  receive.kind = TaskKind::kRecv;
  receive.writes = {ValueId(1)};
  EXPECT_EQ(StagingBytes(receive, values, three, &values[0], &kPair).value,
            4 * 1 * 4);
}

// Columns arrive one after another: each is scattered into the whole.
TEST(Staging, Transfers) {
  const std::vector<Value> values = {Tensor4x6(Columns()), Tensor4x6({})};
  Task send;
  send.kind = TaskKind::kSend;
  send.reads = {ValueId(0)};
  EXPECT_EQ(StagingBytes(send, values, kPair, &values[1], &kSingle).value, 0);
  Task receive;
  receive.kind = TaskKind::kRecv;
  receive.writes = {ValueId(1)};
  EXPECT_EQ(StagingBytes(receive, values, kSingle, &values[0], &kPair).value,
            48);
}

// Rows in three parts (2, 1, 1) to rows in two and columns in two: the first
// shard goes as two halves of 2 x 3 elements, which do not lie in one piece.
TEST(Staging, RaggedTransfer) {
  const DeviceGroup three = {
      "three", {DeviceId(0), DeviceId(1), DeviceId(2)}, {{"a", 3}}};
  const DeviceGroup four = {
      "four",
      {DeviceId(3), DeviceId(4), DeviceId(5), DeviceId(6)},
      {{"a", 2}, {"b", 2}}};
  Layout halves = Rows();
  halves.dims[1] = 2;
  const std::vector<Value> values = {Tensor4x6(Rows())};
  const Value there = Tensor4x6(halves);
  Task task;
  task.kind = TaskKind::kSend;
  task.reads = {ValueId(0)};
  EXPECT_EQ(StagingBytes(task, values, three, &there, &four).value, 2 * 3 * 4);
}

}  // namespace
}  // namespace tessera
