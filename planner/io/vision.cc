#include "planner/io/vision.h"

#include <cmath>

#include "planner/base/table.h"

namespace tessera {
namespace {

// Of a side of an image.
constexpr int64_t kMostPixels = 16384;

// Letters of channels that are put behind each other.
constexpr std::string_view kBranches = "mnopqr";

}  // namespace

ImageSizes ReadImageSizes(ModelConfig& config) {
  ImageSizes sizes;
  sizes.size = config.Size("image_size", sizes.size);
  if (sizes.size > kMostPixels) {
    config.Wrong("image_size", "is " + std::to_string(sizes.size) +
                                   ": expected at most " +
                                   std::to_string(kMostPixels));
  }
  sizes.channels = config.Size("num_channels", sizes.channels);
  const auto names = config.Has("id2label")
                         ? std::ssize(config.Value("id2label").fields)
                         : sizes.labels;
  sizes.labels = config.Size("num_labels", std::max<int64_t>(1, names));
  const auto loss =
      Find("loss", Losses(), config.String("loss", sizes.loss->name));
  if (loss) {
    sizes.loss = *loss;
  } else {
    config.Wrong("loss", loss.error().message);
  }
  return sizes;
}

BatchNormOptions ReadBatchNorm(ModelConfig& config,
                               const ImportOptions& options) {
  BatchNormOptions norm;
  norm.groups = config.Size("batch_norm_groups", norm.groups);
  if (options.global_batch % norm.groups != 0) {
    config.Wrong("batch_norm_groups",
                 "is " + std::to_string(norm.groups) +
                     ": expected a divisor of the global batch, " +
                     std::to_string(options.global_batch));
  }
  norm.momentum = config.Number("batch_norm_momentum", norm.momentum, 0, 1);
  return norm;
}

Vision::Vision(const ModelConfig& config, const ImportOptions& options,
               const ImageSizes& sizes)
    : builder_(GraphName(config.path()), options.global_batch, /*seq_len=*/1,
               options.dtype.value_or(DType::kFloat32)),
      batch_(options.global_batch),
      row_(sizes.loss) {
  if (options.seq_len > 1 && options.warnings != nullptr) {
    options.warnings->push_back(config.path() +
                                ": images have no sequence: its length is "
                                "left out");
  }
  images_ = {
      builder_.Input("images", {batch_, sizes.channels, sizes.size, sizes.size},
                     options.dtype.value_or(DType::kFloat32)),
      sizes.channels, sizes.size, sizes.size};
  labels_ = row_->of_elements
                ? builder_.Input("targets", {batch_, sizes.labels},
                                 options.dtype.value_or(DType::kFloat32))
                : builder_.Input("labels", {batch_}, DType::kInt32);
}

TensorId Vision::Weight(std::string name, Shape shape, double stddev) {
  return builder_.Weight(std::move(name), std::move(shape), {.stddev = stddev},
                         /*weight_decay=*/true);
}

void Vision::Problem(const std::string& name, std::string_view problem) {
  if (problem_.empty()) problem_ = name + ": " + std::string(problem);
}

std::vector<Attribute> Vision::Place(const std::string& name, const Features& x,
                                     const Window& window, Features& y) {
  const auto places = [&](int64_t image, int64_t size, int64_t pad) {
    const int64_t room = image + 2 * pad - window.dilation * (size - 1) - 1;
    if (x.flat() || room < 0) {
      Problem(name, x.flat() ? "the images are features by then"
                             : "the window is larger than the image");
      return int64_t{1};
    }
    int64_t last = room / window.stride;
    // As in PyTorch: a window that would begin in the padding behind is left
    // out.
    if (window.ceil && room % window.stride != 0 &&
        (last + 1) * window.stride < image + pad) {
      ++last;
    }
    return last + 1;
  };
  y.height = places(x.height, window.height, window.pad_height);
  y.width = places(x.width, window.width, window.pad_width);
  return {{"out_height", static_cast<double>(y.height)},
          {"out_width", static_cast<double>(y.width)},
          {"pad_left", static_cast<double>(window.pad_width)},
          {"pad_top", static_cast<double>(window.pad_height)},
          {"stride_height", static_cast<double>(window.stride)},
          {"stride_width", static_cast<double>(window.stride)}};
}

std::string Vision::Letters(const Features& x) {
  return x.flat() ? "bc" : x.groups > 1 ? "bgchw" : "bchw";
}

Shape Vision::Channels(const Features& x) {
  if (x.groups == 1) return {x.channels};
  return {x.groups, x.channels / x.groups};
}

Features Vision::Convolution(const std::string& name, const Features& x,
                             int64_t channels, const Window& window, bool bias,
                             int64_t groups) {
  Features y = {.tensor = {}, .channels = channels, .groups = groups};
  std::vector<Attribute> attributes = Place(name, x, window, y);
  const bool each = x.groups > 1 && groups > 1;
  if (channels % groups != 0 || (each && x.groups != groups)) {
    Problem(name, "the groups do not divide the channels");
  }
  if (!problem_.empty()) return y;
  attributes.push_back(
      {"dilation_height", static_cast<double>(window.dilation)});
  attributes.push_back(
      {"dilation_width", static_cast<double>(window.dilation)});
  const std::string in = x.groups > 1 ? "gc" : "c";
  const std::string out = groups > 1 ? "gn" : "o";
  const std::string shared = each ? "c" : in;
  std::string rule = "b" + in + "h!w!," + out + shared + "k!l!" +
                     (bias ? "+" + out : "") + "->b" + out + "yx";
  Shape shape = Channels(y);
  const Shape read = Channels(x);
  shape.insert(shape.end(), read.begin() + (each ? 1 : 0), read.end());
  shape.insert(shape.end(), {window.height, window.width});
  const double stddev =
      std::sqrt(2 / static_cast<double>(channels / (each ? groups : 1) *
                                        window.height * window.width));
  std::vector<TensorId> operands = {x.tensor,
                                    Weight(name + ".weight", shape, stddev)};
  if (bias) {
    operands.push_back(builder_.Weight(name + ".bias", Channels(y), {}, false));
  }
  y.tensor = builder_.Add1("conv2d", name, std::move(operands), rule,
                           std::move(attributes));
  return y;
}

Features Vision::BatchNorm(const std::string& name, const Features& x,
                           const BatchNormOptions& options) {
  Features y = x;
  if (x.flat()) Problem(name, "the images are features by then");
  if (!problem_.empty()) return y;
  const TensorId scale =
      builder_.Weight(name + ".weight", Channels(x), {.constant = 1}, false);
  const TensorId shift =
      builder_.Weight(name + ".bias", Channels(x), {}, false);
  std::vector<TensorId> operands = {x.tensor, scale, shift};
  std::vector<Attribute> attributes = {{"epsilon", options.epsilon}};
  std::string op = options.groups > 1 ? "ghost_batch_norm" : "batch_norm";
  if (options.tracked) {
    operands.push_back(
        builder_.Weight(name + ".running_mean", Channels(x), {}, false));
    operands.push_back(builder_.Weight(name + ".running_var", Channels(x),
                                       {.constant = 1}, false));
    attributes.push_back({"momentum", options.momentum});
    op = "tracked_" + op;
  }
  if (options.groups > 1) {
    attributes.push_back({"groups", static_cast<double>(options.groups)});
  }
  const std::string c = x.groups > 1 ? "gc" : "c";
  const std::string of_channels =
      "," + std::string(options.groups > 1 ? "b" : "") + c;
  std::string rule = "b" + c + "hw";
  for (size_t k = 1; k < operands.size(); ++k) rule += "," + c;
  rule += "->b" + c + "hw" + of_channels + of_channels;
  y.tensor =
      builder_.Add1(op, name, std::move(operands), rule, std::move(attributes));
  return y;
}

Features Vision::Relu(std::string name, const Features& x) {
  Features y = x;
  if (!problem_.empty()) return y;
  y.tensor = builder_.Add1("relu", std::move(name), {x.tensor},
                           Letters(x) + "->" + Letters(x));
  return y;
}

Features Vision::Pool(std::string_view op, std::string name, const Features& x,
                      const Window& window, std::vector<Attribute> more) {
  Features y = {.tensor = {}, .channels = x.channels};
  std::vector<Attribute> attributes = Place(name, x, window, y);
  if (x.groups > 1) Problem(name, "channels in groups are not pooled");
  if (!problem_.empty()) return y;
  more.push_back({"window_height", static_cast<double>(window.height)});
  more.push_back({"window_width", static_cast<double>(window.width)});
  attributes.insert(attributes.end(), more.begin(), more.end());
  y.tensor = builder_.Add1(op, std::move(name), {x.tensor}, "bch!w!->bcyx",
                           std::move(attributes));
  return y;
}

Features Vision::MaxPool(std::string name, const Features& x,
                         const Window& window) {
  return Pool("max_pool", std::move(name), x, window, {});
}

Features Vision::AveragePool(std::string name, const Features& x,
                             const Window& window) {
  return Pool("average_pool", std::move(name), x, window, {{"count_pad", 1}});
}

Features Vision::Mean(std::string name, const Features& x) {
  Features y = {.tensor = {}, .channels = x.channels};
  if (x.flat()) Problem(name, "the images are features by then");
  if (!problem_.empty()) return y;
  y.tensor = builder_.Add1("image_mean", std::move(name), {x.tensor});
  return y;
}

Features Vision::Dropout(std::string name, const Features& x,
                         double probability) {
  Features y = x;
  if (probability == 0 || !problem_.empty()) return y;
  y.tensor = builder_.Add1("dropout", std::move(name), {x.tensor},
                           Letters(x) + "->" + Letters(x),
                           {{"probability", probability},
                            {"salt", static_cast<double>(dropouts_++)}});
  return y;
}

Features Vision::Linear(const std::string& name, const Features& x,
                        int64_t channels) {
  Features y = {.tensor = {}, .channels = channels};
  if (!problem_.empty()) return y;
  Shape shape = {channels, x.channels};
  int64_t inputs = x.channels;
  if (!x.flat()) {
    shape.insert(shape.end(), {x.height, x.width});
    inputs *= x.height * x.width;
  }
  // The spread of PyTorch's uniform initialisation, within 1 / sqrt(inputs).
  const TensorId weight =
      Weight(name + ".weight", std::move(shape),
             1 / std::sqrt(3 * static_cast<double>(inputs)));
  const TensorId bias = builder_.Weight(name + ".bias", {channels}, {}, false);
  y.tensor = builder_.Add1("linear", name, {x.tensor, weight, bias},
                           x.flat() ? "bc,oc+o->bo" : "bchw,ochw+o->bo");
  return y;
}

Features Vision::Add(std::string name, const Features& x, const Features& y) {
  if (x.channels != y.channels || x.height != y.height || x.width != y.width) {
    Problem(name, "adds images of different sizes");
  }
  if (!problem_.empty()) return x;
  Features sum = x;
  sum.tensor = builder_.Add1("add", std::move(name), {x.tensor, y.tensor},
                             Letters(x) + "," + Letters(x) + "->" + Letters(x));
  return sum;
}

Features Vision::Concat(std::string name,
                        const std::vector<Features>& branches) {
  Features y = branches[0];
  y.channels = 0;
  std::string rule;
  std::vector<TensorId> operands;
  if (branches.size() > kBranches.size()) {
    Problem(name, "has more than 6 branches");
    return y;
  }
  for (size_t i = 0; i < branches.size(); ++i) {
    const Features& branch = branches[i];
    if (branch.flat() || branch.height != y.height || branch.width != y.width) {
      Problem(name, "branches end in images of different sizes");
    }
    y.channels += branch.channels;
    operands.push_back(branch.tensor);
    rule += (i == 0 ? "b" : ",b") + std::string(1, kBranches[i]) + "!hw";
  }
  if (!problem_.empty()) return y;
  y.tensor = builder_.Add1("concat_channels", std::move(name),
                           std::move(operands), rule + "->bd!hw",
                           {{"channels", static_cast<double>(y.channels)}});
  return y;
}

TensorId Vision::CrossEntropy(const std::string& name, const Features& logits,
                              double weight) {
  if (!count_.valid()) {
    count_ = builder_.Add1("count_labels", "count", {labels_}, "b->");
  }
  TensorId count = count_;
  // A loss is a sum over the samples over their number.
  if (weight != 1) {
    count = builder_.Add1("scale", name + ".count", {count_}, "->",
                          {{"factor", 1 / weight}});
  }
  return builder_.Add1("cross_entropy", name, {logits.tensor, labels_, count},
                       "bv,b,->,b");
}

void Vision::Loss(const std::string& name, const Features& logits,
                  double weight) {
  if (!logits.flat()) Problem(name, "expected features of the labels");
  if (!problem_.empty()) return;
  const TensorId loss =
      row_->of_elements ? AddElementLoss(builder_, *row_, name, logits.tensor,
                                         labels_, "bv", weight)
                        : CrossEntropy(name, logits, weight);
  loss_ = loss_.valid()
              ? builder_.Add1("add", name + ".total", {loss_, loss}, ",->")
              : loss;
}

Result<Graph> Vision::Finish() {
  if (!problem_.empty()) return InvalidInput(problem_);
  return builder_.Finish(loss_);
}

}  // namespace tessera
