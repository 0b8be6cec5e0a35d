#pragma once
// The parts that models of images share, on top of GraphBuilder: layers with
// their weights, and the loss. Weights are called as in PyTorch's modules. Not
// for several threads.

#include <string>
#include <string_view>
#include <vector>

#include "planner/io/importer.h"
#include "planner/io/losses.h"
#include "planner/io/model_config.h"
#include "planner/ir/graph.h"

namespace tessera {

// Images [samples, channels, height, width], or features [samples, channels]
// where height and width are 0. Channels in groups are [samples, groups,
// channels / groups, height, width].
struct Features {
  TensorId tensor;
  int64_t channels = 0;
  int64_t height = 0;
  int64_t width = 0;
  int64_t groups = 1;

  bool flat() const { return height == 0; }
};

// A window that moves over images. Padding is on both sides.
struct Window {
  int64_t height = 1;
  int64_t width = 1;
  int64_t stride = 1;
  int64_t pad_height = 0;
  int64_t pad_width = 0;
  int64_t dilation = 1;
  bool ceil = false;  // a last window may go beyond the padding
};

// What a config of such a model has of the data: "image_size" (pixels of both
// sides), "num_channels", "num_labels" (or as many as "id2label" has), and the
// "loss" (planner/io/losses.h).
struct ImageSizes {
  int64_t size = 224;
  int64_t channels = 3;
  int64_t labels = 1000;
  const LossRow* loss = &Losses()[0];
};
ImageSizes ReadImageSizes(ModelConfig& config);

struct BatchNormOptions {
  double epsilon = 1e-5;  // torch.nn.BatchNorm2d's
  // Each microbatch is normed in so many groups of consecutive samples.
  int64_t groups = 1;
  double momentum = 0.1;  // of running averages; torch.nn.BatchNorm2d's
  bool tracked = true;    // running averages are kept
};
// The groups are the key "batch_norm_groups", which divides the global batch,
// the momentum is "batch_norm_momentum".
BatchNormOptions ReadBatchNorm(ModelConfig& config,
                               const ImportOptions& options);

class Vision {
 public:
  // Adds the inputs "images" and "labels", or "targets" [samples, labels] of a
  // loss of elements. A sample is one image: sequences have a length of 1.
  Vision(const ModelConfig& config, const ImportOptions& options,
         const ImageSizes& sizes);

  void BeginBlock(std::string name) { builder_.BeginBlock(std::move(name)); }

  Features images() const { return images_; }

  // Weights NAME.weight and, with a bias, NAME.bias. He et al. (2015)'s
  // initialisation, over the outputs. The result's channels are in `groups`;
  // where those of x are, too, each group is made of its own.
  Features Convolution(const std::string& name, const Features& x,
                       int64_t channels, const Window& window, bool bias,
                       int64_t groups = 1);
  // Weights NAME.weight and NAME.bias.
  Features BatchNorm(const std::string& name, const Features& x,
                     const BatchNormOptions& options);
  Features Relu(std::string name, const Features& x);
  Features MaxPool(std::string name, const Features& x, const Window& window);
  // Padding counts as zeros.
  Features AveragePool(std::string name, const Features& x,
                       const Window& window);
  // Over the whole image.
  Features Mean(std::string name, const Features& x);
  // x itself where the probability is 0.
  Features Dropout(std::string name, const Features& x, double probability);
  // A dense layer over all that a sample has. Weights NAME.weight [channels,
  // ...] and NAME.bias.
  Features Linear(const std::string& name, const Features& x, int64_t channels);
  Features Add(std::string name, const Features& x, const Features& y);
  Features Concat(std::string name, const std::vector<Features>& branches);

  // Adds the loss of `logits`, times `weight`; the first is the model's own.
  void Loss(const std::string& name, const Features& logits, double weight);
  Result<Graph> Finish();

  // The first thing that was wrong with a layer, empty for nothing: a window
  // larger than its image, images where features are expected.
  const std::string& problem() const { return problem_; }

 private:
  // The rule letters of the dimensions of x.
  static std::string Letters(const Features& x);
  // The same as a shape, without samples, height and width.
  static Shape Channels(const Features& x);
  TensorId Weight(std::string name, Shape shape, double stddev);
  void Problem(const std::string& name, std::string_view problem);
  TensorId CrossEntropy(const std::string& name, const Features& logits,
                        double weight);
  // The result's height and width, and what all windows have of attributes.
  std::vector<Attribute> Place(const std::string& name, const Features& x,
                               const Window& window, Features& y);
  Features Pool(std::string_view op, std::string name, const Features& x,
                const Window& window, std::vector<Attribute> more);

  GraphBuilder builder_;
  int64_t batch_ = 0;
  Features images_;
  const LossRow* row_;
  TensorId labels_;  // or targets
  TensorId count_;   // of labels
  TensorId loss_;
  int dropouts_ = 0;
  std::string problem_;
};

}  // namespace tessera
