// ResNet (He et al. 2016): stages of residual layers of two (basic) or three
// (bottleneck) convolutions, each with a batch norm behind it. Names and
// defaults are those of transformers' ResNetConfig and
// ResNetForImageClassification, or, where `architectures` says so, of
// ResNetModel, which ends in the pooled features. Keys of Tessera's own are
// "image_size", "batch_norm_groups" and, as torchvision calls them, "groups"
// and "width_per_group": of the bottlenecks' inner convolution (ResNeXt; Xie et
// al. 2017).

#include <array>
#include <string>
#include <vector>

#include "planner/io/huggingface.h"
#include "planner/io/model_head.h"
#include "planner/io/vision.h"

namespace tessera {
namespace {

// Of each of up to 64 stages.
constexpr ModelConfig::ListLimits kStages = {.most_items = 64, .most = 65536};

// A convolution that keeps the size, or halves it, and its norm.
Features Unit(Vision& model, const BatchNormOptions& norm,
              const std::string& name, const Features& x, int64_t channels,
              int64_t window, int64_t stride, int64_t groups = 1) {
  const Window w = {.height = window,
                    .width = window,
                    .stride = stride,
                    .pad_height = window / 2,
                    .pad_width = window / 2};
  const Features y = model.Convolution(name + ".convolution", x, channels, w,
                                       /*bias=*/false, groups);
  return model.BatchNorm(name + ".normalization", y, norm);
}

}  // namespace

Result<Graph> BuildResNet(ModelConfig& config, const ImportOptions& options) {
  ImageSizes sizes = ReadImageSizes(config);
  const int64_t embedding = config.Size("embedding_size", 64);
  const std::vector<int64_t> widths =
      config.WholeNumbers("hidden_sizes", kStages, {256, 512, 1024, 2048});
  const std::vector<int64_t> depths =
      config.WholeNumbers("depths", kStages, {3, 4, 6, 3});
  const std::string type = config.String("layer_type", "bottleneck");
  const bool halves_first = config.Bool("downsample_in_first_stage", false);
  const bool halves_early = config.Bool("downsample_in_bottleneck", false);
  const int64_t groups = config.Size("groups", 1);
  const int64_t width = config.Size("width_per_group", 64);
  const BatchNormOptions norm = ReadBatchNorm(config, options);
  if (type != "bottleneck" && type != "basic") {
    config.Wrong("layer_type",
                 "is \"" + type + "\": expected \"basic\" or \"bottleneck\"");
  }
  if (config.String("hidden_act", "relu") != "relu") {
    config.Wrong("hidden_act", "expected \"relu\"");
  }
  if (type == "basic" && groups * width != 64) {
    config.Wrong("groups", "a basic layer has none");
  }
  if (widths.size() != depths.size()) {
    config.Wrong("depths", "has " + std::to_string(depths.size()) +
                               " stages, hidden_sizes " +
                               std::to_string(widths.size()));
  }
  const std::array classes = {
      HeadClass{.name = "ResNetForImageClassification"},
      HeadClass{.name = "ResNetModel", .kind = HeadKind::kNone}};
  const Head head = ReadHead(config, classes, options);
  TESSERA_RETURN_IF_ERROR(config.Check());
  if (head.kind == HeadKind::kNone) {
    sizes.labels = widths.back();
    sizes.loss = head.loss;
  }

  Vision model(config, options, sizes);
  model.BeginBlock("embedder");
  const std::string embedder = "resnet.embedder.embedder";
  Features x = Unit(model, norm, embedder, model.images(), embedding, 7, 2);
  x = model.Relu(embedder + ".activation", x);
  x = model.MaxPool(
      "resnet.embedder.pooler", x,
      {.height = 3, .width = 3, .stride = 2, .pad_height = 1, .pad_width = 1});
  for (size_t stage = 0; stage < widths.size(); ++stage) {
    for (int64_t layer = 0; layer < depths[stage]; ++layer) {
      const std::string block = "stages." + std::to_string(stage) + ".layers." +
                                std::to_string(layer);
      const std::string name = "resnet.encoder." + block;
      const int64_t stride = layer == 0 && (stage > 0 || halves_first) ? 2 : 1;
      const int64_t out = widths[stage];
      model.BeginBlock(block);
      const auto unit = [&](int i, const Features& in, int64_t channels,
                            int64_t window, int64_t by, int64_t in_groups = 1) {
        return Unit(model, norm, name + ".layer." + std::to_string(i), in,
                    channels, window, by, in_groups);
      };
      const auto relu = [&](int i, const Features& in) {
        return model.Relu(name + ".layer." + std::to_string(i) + ".activation",
                          in);
      };
      Features y;
      if (type == "basic") {
        y = relu(0, unit(0, x, out, 3, stride));
        y = unit(1, y, out, 3, 1);
      } else {
        const int64_t inner =
            std::max<int64_t>(1, out / 4 * width / 64) * groups;
        y = relu(0, unit(0, x, inner, 1, halves_early ? stride : 1, groups));
        y = relu(1, unit(1, y, inner, 3, halves_early ? 1 : stride, groups));
        y = unit(2, y, out, 1, 1);
      }
      if (x.channels != out || stride != 1) {
        x = Unit(model, norm, name + ".shortcut", x, out, 1, stride);
      }
      x = model.Relu(name + ".activation", model.Add(name + ".add", y, x));
    }
  }
  model.BeginBlock("head");
  x = model.Mean("resnet.pooler", x);
  if (head.kind == HeadKind::kOwn) {
    x = model.Linear("classifier.1", x, sizes.labels);
  }
  model.Loss("loss", x, 1);
  return model.Finish();
}

}  // namespace tessera
