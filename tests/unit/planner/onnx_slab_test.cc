// Weights of recurrent layers, cut, joined and turned as exporters do: where
// each element lies in the file's tensors.

#include "planner/io/onnx_slab.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace tessera::onnx {
namespace {

OnnxTensor TensorOf(const std::string& name, const Shape& dims) {
  OnnxTensor tensor;
  tensor.name = name;
  tensor.dims = dims;
  return tensor;
}

// Of each element, row by row, its tensor and its place there.
std::vector<std::pair<std::string, int64_t>> PlacesOf(const Slab& slab) {
  std::vector<std::pair<std::string, int64_t>> places;
  for (const PublishedPiece& piece : PiecesOf(slab)) {
    EXPECT_EQ(piece.begin, std::ssize(places));
    for (int64_t i = 0; i < piece.count; ++i) {
      places.emplace_back(piece.tensor, piece.PlaceOf(i));
    }
  }
  return places;
}

constexpr size_t kInOrder[] = {0, 1};

// Rows of [3, 2] in the order 2, 0, 1, as [1, 3, 2]: rows begin at 4, 0 and 2.
TEST(OnnxSlab, RowsAreCutAndJoinedInAnotherOrder) {
  const OnnxTensor w = TensorOf("w", {3, 2});
  const Slab whole = SlabOf(w, kInOrder);
  const auto joint = JointOf(
      {CutOf(whole, 0, 2, 1), CutOf(whole, 0, 0, 1), CutOf(whole, 0, 1, 1)}, 0);
  ASSERT_TRUE(joint.has_value());
  const auto slab = RelabelledOf(*joint, {1, 3, 2});
  ASSERT_TRUE(slab.has_value());
  EXPECT_EQ(slab->shape, (Shape{1, 3, 2}));
  const std::vector<std::pair<std::string, int64_t>> expected = {
      {"w", 4}, {"w", 5}, {"w", 0}, {"w", 1}, {"w", 2}, {"w", 3}};
  EXPECT_EQ(PlacesOf(*slab), expected);
  // The middle row again.
  EXPECT_EQ(PlacesOf(CutOf(*slab, 1, 1, 1)),
            (std::vector<std::pair<std::string, int64_t>>{{"w", 0}, {"w", 1}}));
  EXPECT_FALSE(RelabelledOf(*joint, {2, 3}).has_value());
}

// Two directions, each of one tensor: [2, 2, 1].
TEST(OnnxSlab, DirectionsAreJoinedInFront) {
  const OnnxTensor a = TensorOf("a", {2, 1});
  const OnnxTensor b = TensorOf("b", {2, 1});
  const auto joint = JointOf({*RelabelledOf(SlabOf(a, kInOrder), {1, 2, 1}),
                              *RelabelledOf(SlabOf(b, kInOrder), {1, 2, 1})},
                             0);
  ASSERT_TRUE(joint.has_value());
  EXPECT_EQ(PlacesOf(CutOf(*joint, 0, 1, 1)),
            (std::vector<std::pair<std::string, int64_t>>{{"b", 0}, {"b", 1}}));
  // A joint inside of rows: of each row the element of both.
  const auto beside = JointOf({SlabOf(a, kInOrder), SlabOf(b, kInOrder)}, 1);
  ASSERT_TRUE(beside.has_value());
  const std::vector<std::pair<std::string, int64_t>> rows = {
      {"a", 0}, {"b", 0}, {"a", 1}, {"b", 1}};
  EXPECT_EQ(PlacesOf(*beside), rows);
  EXPECT_FALSE(JointOf({SlabOf(a, kInOrder), SlabOf(b, kInOrder)}, 2));
  const OnnxTensor three = TensorOf("three", {3, 1});
  EXPECT_FALSE(JointOf({SlabOf(a, kInOrder), SlabOf(three, kInOrder)}, 1));
}

// Element (c, r) of [2, 3] turned is at 3 r + c; columns of one row follow each
// other a row apart.
TEST(OnnxSlab, TurnedTensorsHaveStrides) {
  const OnnxTensor w = TensorOf("w", {2, 3});
  constexpr size_t kTurned[] = {1, 0};
  const Slab turned = SlabOf(w, kTurned);
  EXPECT_EQ(turned.shape, (Shape{3, 2}));
  const std::vector<std::pair<std::string, int64_t>> expected = {
      {"w", 0}, {"w", 3}, {"w", 1}, {"w", 4}, {"w", 2}, {"w", 5}};
  EXPECT_EQ(PlacesOf(turned), expected);
  EXPECT_EQ(PlacesOf(TurnedOf(turned, kTurned)), PlacesOf(SlabOf(w, kInOrder)));
  EXPECT_TRUE(PiecesOf(SlabOf(w, kInOrder))[0].block.empty());
}

}  // namespace
}  // namespace tessera::onnx
