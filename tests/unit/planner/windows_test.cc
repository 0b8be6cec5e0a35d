#include "planner/plan/windows.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "planner/base/rng.h"
#include "planner/plan/layout.h"
#include "planner/plan/plan.h"

namespace tessera {
namespace {

// Without attributes a window moves by one, over what is there.
TEST(Windows, StepsAreThoseOfTheirDirection) {
  const std::vector<Attribute> attributes = {
      {"dilation_height", 2}, {"pad_left", 3}, {"stride_height", 4}};
  const WindowSteps high = StepsOf(attributes, Direction::kHeight);
  EXPECT_EQ(high.stride, 4);
  EXPECT_EQ(high.pad, 0);
  EXPECT_EQ(high.dilation, 2);
  EXPECT_EQ(high.Span(3), 5);
  const WindowSteps wide = StepsOf(attributes, Direction::kWidth);
  EXPECT_EQ(wide.stride, 1);
  EXPECT_EQ(wide.pad, 3);
  EXPECT_EQ(wide.dilation, 1);
  EXPECT_EQ(wide.Span(3), 3);
}

// A 3-wide window over 8 pixels, padded by 1, at 8 places, in 2 shards of 4:
// the first reads pixels 0 to 4, the second 3 to 7.
TEST(Windows, OfThreeReachOneFurther) {
  const Windows w = {.in = 8, .out = 8, .stride = 1, .pad = 1, .span = 3};
  EXPECT_EQ(ImageReach(w, 2).before, 1);
  EXPECT_EQ(ImageReach(w, 2).after, 1);
  // Pixel 3 is under places 2 to 4, pixel 4 under 3 to 5.
  EXPECT_EQ(PlaceReach(w, 2).before, 1);
  EXPECT_EQ(PlaceReach(w, 2).after, 1);
  // Place 4 covers pixels 3 to 5, place 3 covers 2 to 4.
  EXPECT_EQ(TouchedReach(w, 2).before, 2);
  EXPECT_EQ(TouchedReach(w, 2).after, 2);
}

// Windows that do not overlap and end with the shards reach nowhere.
TEST(Windows, SideBySideReachNowhere) {
  const Windows w = {.in = 8, .out = 4, .stride = 2, .pad = 0, .span = 2};
  for (const Reach reach :
       {ImageReach(w, 2), PlaceReach(w, 2), TouchedReach(w, 2)}) {
    EXPECT_EQ(reach.before, 0);
    EXPECT_EQ(reach.after, 0);
  }
}

// A strided window of 7, as in a ResNet's stem: places 0 to 3 of 8 cover pixels
// -3 to 9 of 16, places 4 to 7 cover 5 to 17.
TEST(Windows, OfAStem) {
  const Windows w = {.in = 16, .out = 8, .stride = 2, .pad = 3, .span = 7};
  EXPECT_EQ(ImageReach(w, 2).before, 3);
  EXPECT_EQ(ImageReach(w, 2).after, 2);
}

// Index by index, on random windows.
TEST(Windows, ReachIsWhatIsRead) {
  Rng rng(1);
  for (int trial = 0; trial < 2000; ++trial) {
    Windows w;
    w.span = 1 + rng.Below(7);
    w.stride = 1 + rng.Below(4);
    w.pad = rng.Below(static_cast<uint32_t>(w.span));
    const int64_t parts = 2 + rng.Below(4);
    w.in = parts + rng.Below(20);
    // The last window begins inside the image.
    const auto most = (w.in - 1 + w.pad) / w.stride + 1;
    if (most < parts) continue;
    w.out = parts + rng.Below(static_cast<uint32_t>(most - parts + 1));
    // Whether window `o` covers pixel `i`.
    const auto covers = [&](int64_t o, int64_t i) {
      const int64_t first = o * w.stride - w.pad;
      return first <= i && i < first + w.span;
    };
    Reach image;
    Reach place;
    Reach touched;
    const auto widen = [](Reach& reach, Range own, int64_t index) {
      reach.before = std::max(reach.before, own.begin - index);
      reach.after = std::max(reach.after, index + 1 - own.end);
    };
    for (int64_t p = 0; p < parts; ++p) {
      const Range pixels = ShardRange(w.in, parts, p);
      const Range places = ShardRange(w.out, parts, p);
      for (int64_t o = 0; o < w.out; ++o) {
        bool touches = false;
        for (int64_t i = pixels.begin; i < pixels.end; ++i) {
          touches = touches || covers(o, i);
        }
        if (touches) widen(place, places, o);
        for (int64_t i = 0; i < w.in; ++i) {
          if (!covers(o, i)) continue;
          if (places.begin <= o && o < places.end) widen(image, pixels, i);
          if (touches) widen(touched, pixels, i);
        }
      }
    }
    const auto expect = [&](const Reach& actual, const Reach& expected) {
      EXPECT_EQ(actual.before, expected.before);
      EXPECT_EQ(actual.after, expected.after);
    };
    SCOPED_TRACE(::testing::Message()
                 << w.in << " -> " << w.out << " stride " << w.stride << " pad "
                 << w.pad << " span " << w.span << " in " << parts);
    expect(ImageReach(w, parts), image);
    expect(PlaceReach(w, parts), place);
    expect(TouchedReach(w, parts), touched);
  }
}

// A convolution of 3 x 3, stride 1, over images of 8 x 8, the rows of what it
// makes split over an axis of 2.
class ConvolutionLayouts : public ::testing::Test {
 protected:
  void SetUp() override {
    GraphBuilder builder("convolution", 2, 1, DType::kFloat32);
    builder.BeginBlock("main");
    const TensorId images =
        builder.Input("images", {2, 3, 8, 8}, DType::kFloat32);
    const TensorId labels = builder.Input("labels", {2}, DType::kInt32);
    const auto convolution = [&](const std::string& name, TensorId x,
                                 int64_t channels) {
      const TensorId w = builder.Weight(
          name + ".w", {channels, builder.shape(x)[1], 3, 3}, {}, true);
      return builder.Add1("conv2d", name, {x, w}, "bch!w!,ock!l!->boyx",
                          {{"dilation_height", 1},
                           {"dilation_width", 1},
                           {"out_height", 8},
                           {"out_width", 8},
                           {"pad_left", 1},
                           {"pad_top", 1},
                           {"stride_height", 1},
                           {"stride_width", 1}});
    };
    const TensorId x =
        convolution("second", convolution("first", images, 4), 5);
    const TensorId y = builder.Add1("image_mean", "mean", {x});
    const TensorId count =
        builder.Add1("count_labels", "count", {labels}, "b->");
    graph_ =
        Differentiate(builder
                          .Finish(builder.Add1("cross_entropy", "loss",
                                               {y, labels, count}, "bv,b,->,b"))
                          .value())
            .value();
    group_.axes = {{"a", 2}};
    group_.devices = {DeviceId(0), DeviceId(1)};
  }
  const Node& NodeOf(std::string_view op, std::string_view name) const {
    for (const Node& node : graph_.nodes) {
      if (node.op->name == op && node.name.starts_with(name)) return node;
    }
    TESSERA_CHECK(false) << op;
    return graph_.nodes[0];
  }
  static OpPlacement Rows(const Node& node) {
    OpPlacement placement;
    placement.axes[static_cast<size_t>(node.rule.FactorOf('y'))] = 1;
    return placement;
  }
  static Layout RowsSplit(int32_t before, int32_t after) {
    Layout layout;
    layout.dims[2] = 1;
    if (before + after > 0) layout.halos[0] = {2, before, after};
    return layout;
  }
  Graph graph_;
  DeviceGroup group_;
};

TEST_F(ConvolutionLayouts, ForwardReadsAHaloOfTheImage) {
  const Node& node = NodeOf("conv2d", "second");
  EXPECT_EQ(OperandLayout(graph_, node, Rows(node), group_, 0),
            RowsSplit(1, 1));
  EXPECT_EQ(OperandLayout(graph_, node, Rows(node), group_, 1), Layout());
  EXPECT_EQ(ResultLayout(graph_, node, Rows(node), group_, 0), RowsSplit(0, 0));
}

TEST_F(ConvolutionLayouts, TheImagesGradientReadsAHaloOfThePlaces) {
  const Node& node = NodeOf("conv2d_dx", "second");
  EXPECT_EQ(OperandLayout(graph_, node, Rows(node), group_, 0),
            RowsSplit(1, 1));
  EXPECT_EQ(ResultLayout(graph_, node, Rows(node), group_, 0), RowsSplit(0, 0));
}

TEST_F(ConvolutionLayouts, TheWeightsGradientIsPartial) {
  const Node& node = NodeOf("conv2d_dw", "second");
  EXPECT_EQ(OperandLayout(graph_, node, Rows(node), group_, 0),
            RowsSplit(0, 0));
  EXPECT_EQ(OperandLayout(graph_, node, Rows(node), group_, 1),
            RowsSplit(1, 1));
  Layout partial;
  partial.partial = 1;
  EXPECT_EQ(ResultLayout(graph_, node, Rows(node), group_, 0), partial);
}

TEST_F(ConvolutionLayouts, BlocksOfAHalo) {
  const Shape shape = {2, 4, 8, 8};
  EXPECT_EQ(BlockAt(RowsSplit(1, 1), group_, shape, 0)[2], (Range{0, 5}));
  EXPECT_EQ(BlockAt(RowsSplit(1, 1), group_, shape, 1)[2], (Range{3, 8}));
  EXPECT_EQ(LargestExtent(RowsSplit(2, 1), group_, shape, 2), 6);
}

// What becomes a halo, and what a halo becomes.
TEST_F(ConvolutionLayouts, Resharding) {
  const Layout halo = RowsSplit(1, 1);
  const Layout rows = RowsSplit(0, 0);
  Layout partial;
  partial.partial = 1;
  using Steps = std::vector<ReshardStep>;
  EXPECT_EQ(PlanReshard(rows, halo, group_),
            (Steps{{ReshardKind::kRedistribute, 1, halo}}));
  EXPECT_EQ(PlanReshard(Layout(), halo, group_),
            (Steps{{ReshardKind::kSlice, 0, halo}}));
  EXPECT_EQ(PlanReshard(partial, halo, group_),
            (Steps{{ReshardKind::kReduceScatter, 1, rows},
                   {ReshardKind::kRedistribute, 1, halo}}));
  EXPECT_EQ(PlanReshard(halo, rows, group_),
            (Steps{{ReshardKind::kSlice, 0, rows}}));
  EXPECT_EQ(PlanReshard(halo, halo, group_), Steps{});
}

}  // namespace
}  // namespace tessera
