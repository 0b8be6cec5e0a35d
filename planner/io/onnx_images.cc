// Nodes that compute images: convolutions, pooling, norms and joints.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

namespace {

// Whether the channels of images are (groups, channels of a group).
bool InGroups(const Activation& x) {
  return x.dims[1].size() == 2;
}

// Their letters in rules.
std::string ChannelsOf(const Activation& x) {
  return InGroups(x) ? "gc" : "c";
}

// The images [samples, channels, height, width].
Activation ImagesOf(TensorId tensor, std::vector<Dim> dims) {
  Activation x;
  x.tensor = tensor;
  x.own = Flatten(dims);
  x.dims = std::move(dims);
  return x;
}

}  // namespace

Result<Activation> Walk::Image(const OnnxNode& node, size_t i) {
  TESSERA_TRY(Activation x, Computed(node, i));
  TESSERA_TRY(x, Contiguous(node, std::move(x)));
  const bool image = x.dims.size() == 4 && x.dims[0].size() == 1 &&
                     x.dims[2].size() == 1 && x.dims[3].size() == 1 &&
                     (x.dims[1].size() == 1 || InGroups(x)) &&
                     SameAtoms(Flatten(x.dims), x.own);
  if (image) return x;
  return InvalidInput(
      "expected images, [samples, channels, height, width], found " +
      TextOf(ShapeOf(ActivationValue(x))));
}

Result<Places> Walk::Window(const OnnxNode& node, size_t direction,
                            int64_t image, int64_t window,
                            int64_t dilation) const {
  const std::vector<int64_t> strides = node.Ints("strides", {1, 1});
  const std::vector<int64_t> pads = node.Ints("pads", {0, 0, 0, 0});
  const std::string automatic = node.Text("auto_pad", "NOTSET");
  const auto small = [](int64_t value, int64_t least) {
    return value >= least && value <= 65536;
  };
  if (strides.size() != 2 || pads.size() != 4 ||
      !small(strides[direction], 1) || !small(window, 1) ||
      !small(dilation, 1) || !small(pads[direction], 0) ||
      !small(pads[direction + 2], 0)) {
    return InvalidInput(
        "expected a window in two dimensions with strides, padding and "
        "dilations of up to 65536");
  }
  const int64_t stride = strides[direction];
  const int64_t reach = dilation * (window - 1) + 1;
  Places places;
  int64_t before = pads[direction];
  int64_t behind = pads[direction + 2];
  if (automatic == "SAME_UPPER" || automatic == "SAME_LOWER") {
    const int64_t count = (image + stride - 1) / stride;
    const int64_t all =
        std::max<int64_t>(0, (count - 1) * stride + reach - image);
    before = automatic == "SAME_UPPER" ? all / 2 : all - all / 2;
    behind = all - before;
  } else if (automatic == "VALID") {
    before = behind = 0;
  } else if (automatic != "NOTSET" && !automatic.empty()) {
    return InvalidInput("unknown auto_pad '" + automatic + "'");
  }
  const int64_t room = image + before + behind - reach;
  if (room < 0) return InvalidInput("the window is larger than the image");
  places.pad = before;
  places.count = room / stride + 1;
  // A window that would begin in the padding behind is left out.
  if (node.Int("ceil_mode", 0) != 0 && room % stride != 0 &&
      places.count * stride < image + before) {
    ++places.count;
  }
  return places;
}

Result<void> Walk::Pool(const OnnxNode& node, std::string_view op,
                        std::vector<Attribute> more) {
  TESSERA_TRY(const Activation x, Image(node, 0));
  const std::vector<int64_t> window = node.Ints("kernel_shape", {});
  const std::vector<int64_t> strides = node.Ints("strides", {1, 1});
  if (window.size() != 2) {
    return InvalidInput("expected a window in two dimensions");
  }
  if (node.Ints("dilations", {1, 1}) != std::vector<int64_t>{1, 1} ||
      node.Int("storage_order", 0) != 0 || node.outputs.size() > 1) {
    return InvalidInput(
        "dilations, indices and column-major order are not supported");
  }
  TESSERA_TRY(const Places y, Window(node, 0, Extent(x.dims[2]), window[0], 1));
  TESSERA_TRY(const Places z, Window(node, 1, Extent(x.dims[3]), window[1], 1));
  const std::string name = NameOf(node);
  TESSERA_TRY(const Atom height, Whole(AtomOf(node, "h"), y.count, 'h'));
  TESSERA_TRY(const Atom width, Whole(AtomOf(node, "w"), z.count, 'w'));
  more.insert(more.end(), {{"out_height", Number(y.count)},
                           {"out_width", Number(z.count)},
                           {"pad_left", Number(z.pad)},
                           {"pad_top", Number(y.pad)},
                           {"stride_height", Number(strides[0])},
                           {"stride_width", Number(strides[1])},
                           {"window_height", Number(window[0])},
                           {"window_width", Number(window[1])}});
  const std::string rows = "b" + ChannelsOf(x);
  const TensorId result =
      builder_.Add1(op, Unique(name), {x.tensor}, rows + "h!w!->" + rows + "yx",
                    std::move(more));
  Set(node, ActivationValue(
                ImagesOf(result, {x.dims[0], x.dims[1], {height}, {width}})));
  return {};
}

const OnnxNode* Walk::OnlyReader(const std::string& value,
                                 std::string_view op) {
  const OnnxNode* only = nullptr;
  for (const OnnxNode* reader : readers_[value]) {
    if (reader->op == "Shape") continue;
    if (only != nullptr || reader->op != op) return nullptr;
    only = reader;
  }
  return only != nullptr && !only->outputs.empty() ? only : nullptr;
}

// A convolution whose stride is its window, and whose places are a sequence
// behind one more: then the data are patches (docs/models.md, ViT).
void Walk::FindPatches() {
  if (sizes_.inputs.size() != 1 || sizes_.inputs[0].name != "images" ||
      sizes_.inputs[0].shape.size() != 4) {
    return;
  }
  const std::string& images = sizes_.inputs[0].input->name;
  const OnnxNode* const conv = OnlyReader(images, "Conv");
  if (conv == nullptr || conv->inputs.size() < 2) return;
  const OnnxNode* flat = OnlyReader(conv->outputs[0], "Reshape");
  if (flat == nullptr) flat = OnlyReader(conv->outputs[0], "Flatten");
  const OnnxNode* const turned =
      flat == nullptr ? nullptr : OnlyReader(flat->outputs[0], "Transpose");
  const OnnxNode* const joined =
      turned == nullptr ? nullptr : OnlyReader(turned->outputs[0], "Concat");
  const Shape& image = sizes_.inputs[0].shape;
  const Shape window = ShapeOf(In(*conv, 1));
  if (joined == nullptr || joined->inputs.size() != 2 ||
      joined->inputs[1] != turned->outputs[0] || joined->Int("axis", 0) != 1 ||
      turned->Ints("perm", {}) != std::vector<int64_t>{0, 2, 1} ||
      !In(*conv, 1).Is(Value::Kind::kWeight) || window.size() != 4 ||
      window[1] != image[1] || window[2] != window[3] || window[2] < 1 ||
      image[2] != image[3] || image[2] % window[2] != 0 ||
      conv->Ints("strides", {1, 1}) != Shape{window[2], window[2]} ||
      conv->Ints("pads", {0, 0, 0, 0}) != Shape{0, 0, 0, 0} ||
      conv->Ints("dilations", {1, 1}) != Shape{1, 1} ||
      conv->Int("group", 1) != 1) {
    return;
  }
  patches_ = Patches{conv, flat, turned, joined, image[2] / window[2]};
  seq_len_ = patches_->side * patches_->side + 1;
  done_.insert({flat, turned});
}

// The convolution of the patches behind one of zeros, and its bias for all
// places but that one, where the class token is.
Result<void> Walk::JoinPatches(const OnnxNode& node) {
  const OnnxNode& conv = *patches_->conv;
  const Value& w = In(conv, 1);
  const Shape shape = ShapeOf(w);
  const Value& first = In(node, 0);
  if (!first.Is(Value::Kind::kWeight) ||
      ShapeOf(first) != Shape{1, 1, shape[0]}) {
    return InvalidInput("expected a class token in front of the patches");
  }
  const std::string name = NameOf(conv);
  const TensorId patches = builder_.Input(
      Unique("patches"), {sizes_.batch, seq_len_, shape[1], shape[2], shape[3]},
      options_.dtype.value_or(DType::kFloat32));
  const double inputs = Number(shape[1]) * Number(shape[2]) * Number(shape[3]);
  TESSERA_TRY(const TensorId weight,
              Weight(w, {0, 1, 2, 3}, shape, 1 / std::sqrt(3 * inputs)));
  TESSERA_TRY(const Atom h, Whole(AtomOf(conv, "h"), shape[0], 'f'));
  Activation x;
  x.tensor = builder_.Add1("linear", Unique(name), {patches, weight},
                           "bscuv,ocuv->bso");
  x.own = {SampleAtom(), PlaceAtom(), h};
  for (const Atom& atom : x.own) x.dims.push_back({atom});
  const auto add = [&](const std::string& what, const Value& row,
                       std::vector<size_t> order,
                       const std::string& input) -> Result<void> {
    TESSERA_TRY(const Activation y, Lookup(name + what, row, std::move(order),
                                           {1, shape[0]}, input));
    x.tensor = builder_.Add1("add", Unique(name + what + ".add"),
                             {x.tensor, y.tensor}, "bsh,bsh->bsh");
    return {};
  };
  if (Has(conv, 2)) {
    if (ShapeOf(In(conv, 2)) != Shape{shape[0]}) {
      return InvalidInput("its bias is not one number for each feature");
    }
    TESSERA_RETURN_IF_ERROR(add(".bias", In(conv, 2), {0}, "patch_rows"));
  }
  TESSERA_RETURN_IF_ERROR(add(".class", first, {0, 1, 2}, "positions"));
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::Convolution(const OnnxNode& node) {
  if (patches_ && patches_->conv == &node) {
    // For nodes that ask for shapes.
    const int64_t features = ShapeOf(In(node, 1))[0];
    const auto set = [&](const OnnxNode& of, const Shape& shape) {
      Activation x;
      for (int64_t extent : shape) x.dims.push_back({{-1, extent, 'z'}});
      Set(of, ActivationValue(std::move(x)));
    };
    const int64_t side = patches_->side;
    set(node, {sizes_.batch, features, side, side});
    set(*patches_->flat, {sizes_.batch, features, side * side});
    set(*patches_->turned, {sizes_.batch, side * side, features});
    return {};
  }
  TESSERA_TRY(Activation x, Image(node, 0));
  const Value& w = In(node, 1);
  const Shape shape = ShapeOf(w);
  const int64_t groups = node.Int("group", 1);
  const int64_t read = Extent(x.dims[1]);
  const std::vector<int64_t> dilations = node.Ints("dilations", {1, 1});
  if (!w.Is(Value::Kind::kWeight) || shape.size() != 4 ||
      dilations.size() != 2) {
    return InvalidInput(
        "expected a window in two dimensions, a tensor of the file");
  }
  if (groups < 1 || shape[0] < 1 || shape[1] < 1 || shape[0] % groups != 0 ||
      read % groups != 0 || shape[1] != read / groups) {
    return InvalidInput("reads " + std::to_string(read) +
                        " channels: its weight has " + TextOf(shape) + " in " +
                        std::to_string(groups) + " groups");
  }
  TESSERA_TRY(const Places y,
              Window(node, 0, Extent(x.dims[2]), shape[2], dilations[0]));
  TESSERA_TRY(const Places z,
              Window(node, 1, Extent(x.dims[3]), shape[3], dilations[1]));
  const std::string name = NameOf(node);
  Dim channels = atoms_.Make(AtomOf(node, "c"), shape[0], 'c');
  const bool grouped = groups > 1;
  if (grouped) {
    // Both sides have the groups as a dimension of their own.
    if (!InGroups(x)) {
      const Atom whole = x.dims[1][0];
      x.dims[1] = atoms_.Split(whole, groups);
      ReplaceIn(x.own, whole, x.dims[1]);
    }
    if (channels.size() == 1) channels = atoms_.Split(channels[0], groups);
  }
  const auto fits = [&](const Dim& dim) {
    return dim.size() <= 2 &&
           (!grouped || (dim.size() == 2 && dim[0].extent == groups));
  };
  if (!fits(x.dims[1]) || !fits(channels)) {
    return InvalidInput(
        "its groups of channels are not those of its neighbours");
  }
  TESSERA_TRY(const Atom height, Whole(AtomOf(node, "h"), y.count, 'h'));
  TESSERA_TRY(const Atom width, Whole(AtomOf(node, "w"), z.count, 'w'));
  const std::string in = ChannelsOf(x);
  const std::string out = channels.size() == 1 ? "o" : grouped ? "gn" : "pn";
  Shape window = ExtentsOf(channels);
  const Shape made = window;
  for (const Atom& atom : std::span(x.dims[1]).subspan(grouped ? 1 : 0)) {
    window.push_back(atom.extent);
  }
  window.insert(window.end(), {shape[2], shape[3]});
  // He et al. (2015), over the outputs.
  const double stddev = std::sqrt(
      2 / (Number(shape[0] / groups) * Number(shape[2]) * Number(shape[3])));
  TESSERA_TRY(const TensorId weight, Weight(w, {0, 1, 2, 3}, window, stddev));
  std::vector<TensorId> operands = {x.tensor, weight};
  std::string rule = "b" + in + "h!w!," + out + (grouped ? "c" : in) + "k!l!";
  if (Has(node, 2)) {
    if (ShapeOf(In(node, 2)) != Shape{shape[0]}) {
      return InvalidInput("its bias is not one number for each channel");
    }
    TESSERA_TRY(const TensorId bias, Weight(In(node, 2), {0}, made, 0));
    operands.push_back(bias);
    rule += "+" + out;
  }
  const std::vector<int64_t> strides = node.Ints("strides", {1, 1});
  const TensorId result =
      builder_.Add1("conv2d", Unique(name), operands, rule + "->b" + out + "yx",
                    {{"dilation_height", Number(dilations[0])},
                     {"dilation_width", Number(dilations[1])},
                     {"out_height", Number(y.count)},
                     {"out_width", Number(z.count)},
                     {"pad_left", Number(z.pad)},
                     {"pad_top", Number(y.pad)},
                     {"stride_height", Number(strides[0])},
                     {"stride_width", Number(strides[1])}});
  Set(node, ActivationValue(
                ImagesOf(result, {x.dims[0], channels, {height}, {width}})));
  return {};
}

Result<void> Walk::BatchNorm(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Image(node, 0));
  const Shape all = {Extent(x.dims[1])};
  if (ShapeOf(In(node, 1)) != all || ShapeOf(In(node, 2)) != all) {
    return InvalidInput(
        "its scale or shift is not one number for each channel");
  }
  const Shape shape = ExtentsOf(x.dims[1]);
  TESSERA_TRY(const TensorId scale, Weight(In(node, 1), {0}, shape, 0, 1));
  TESSERA_TRY(const TensorId shift, Weight(In(node, 2), {0}, shape, 0));
  const std::string c = ChannelsOf(x);
  const std::string images = "b" + c + "hw";
  const std::string rule = images + "," + c + "," + c + "->" + images;
  const double epsilon = node.Float("epsilon", 1e-5);
  const auto groups = options_.overrides.find(kBatchNormGroups);
  if (groups != options_.overrides.end() && groups->second.number > 1) {
    x.tensor = builder_.Add1(
        "ghost_batch_norm", Unique(NameOf(node)), {x.tensor, scale, shift},
        rule + ",b" + c + ",b" + c,
        {{"epsilon", epsilon}, {"groups", groups->second.number}});
  } else {
    x.tensor = builder_.Add1("batch_norm", Unique(NameOf(node)),
                             {x.tensor, scale, shift}, rule + "," + c + "," + c,
                             {{"epsilon", epsilon}});
  }
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::MaxPool(const OnnxNode& node) {
  return Pool(node, "max_pool", {});
}

Result<void> Walk::AveragePool(const OnnxNode& node) {
  return Pool(node, "average_pool",
              {{"count_pad", Number(node.Int("count_include_pad", 0) != 0)}});
}

Result<void> Walk::MeanOfImage(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Image(node, 0));
  const std::string rows = "b" + ChannelsOf(x);
  x.tensor = builder_.Add1("image_mean", Unique(NameOf(node)), {x.tensor},
                           rows + "hw->" + rows);
  x.own.resize(rows.size());
  x.dims[2].clear();
  x.dims[3].clear();
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::GlobalAveragePool(const OnnxNode& node) {
  if (ShapeOf(In(node, 0)).size() != 4) return GlobalMaxPool(node);
  return MeanOfImage(node);
}

Result<void> Walk::GlobalMaxPool(const OnnxNode& node) {
  std::vector<int64_t> axes(ShapeOf(In(node, 0)).size());
  std::iota(axes.begin(), axes.end(), 0);
  axes.erase(axes.begin(),
             axes.begin() + std::min<int64_t>(2, std::ssize(axes)));
  OnnxAttribute over;
  over.name = "axes";
  over.ints = axes;
  TESSERA_TRY(
      const std::string y,
      Part(node, node.op == "GlobalMaxPool" ? "ReduceMax" : "ReduceMean",
           {node.inputs[0]}, {over}));
  Rename(node, y);
  return {};
}

Result<void> Walk::Concat(const OnnxNode& node) {
  if (patches_ && patches_->joined == &node) return JoinPatches(node);
  TESSERA_TRY(const bool states, JoinStates(node));
  if (states) return {};
  std::vector<Activation> parts;
  size_t place = 0;  // of the joint dimension among the tensor's
  size_t axis = 0;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    TESSERA_TRY(Activation x, Computed(node, i));
    TESSERA_TRY(x, Contiguous(node, std::move(x)));
    const auto d = AxisOf(node.Int("axis", 1), x.dims.size());
    if (!d || x.dims[*d].size() != 1 || x.dims[*d][0].letter == 'b') {
      return InvalidInput("joins a dimension that is several, or samples");
    }
    const size_t front = Flatten(std::span(x.dims).first(*d)).size();
    if (i == 0) {
      axis = *d;
      place = front;
    }
    bool alike = front == place && axis == *d &&
                 (parts.empty() || parts[0].own.size() == x.own.size());
    for (size_t at = 0; alike && i > 0 && at < x.own.size(); ++at) {
      alike = at == place || x.own[at].extent == parts[0].own[at].extent;
    }
    if (!alike) return InvalidInput("joins tensors of different sizes");
    parts.push_back(std::move(x));
  }
  if (parts.empty()) return InvalidInput("has no operands");
  if (parts.size() == 1) {
    Set(node, ActivationValue(std::move(parts[0])));
    return {};
  }
  // An operator joins six.
  constexpr std::string_view kLetters = "mnopqr";
  const std::string name = NameOf(node);
  Activation joint = parts[0];
  Letters others("mnopqrd");
  std::string front;
  std::string behind;
  for (size_t at = 0; at < joint.own.size(); ++at) {
    if (at == place) continue;
    (at < place ? front : behind) +=
        others.Of(std::span(joint.own).subspan(at, 1));
  }
  for (size_t first = 1; first < parts.size();) {
    const size_t last = std::min(parts.size(), first + kLetters.size() - 1);
    std::string rule = front + "m!" + behind;
    std::vector<TensorId> operands = {joint.tensor};
    int64_t channels = joint.own[place].extent;
    for (size_t i = first; i < last; ++i) {
      rule += "," + front + kLetters[i - first + 1] + "!" + behind;
      operands.push_back(parts[i].tensor);
      channels += parts[i].own[place].extent;
    }
    TESSERA_TRY(joint.own[place],
                Whole(AtomOf(node, "c" + std::to_string(last)), channels,
                      joint.own[place].letter));
    joint.dims[axis] = {joint.own[place]};
    joint.tensor = builder_.Add1(
        "concat_channels", Unique(name), std::move(operands),
        rule + "->" + front + "d!" + behind, {{"channels", Number(channels)}});
    first = last;
  }
  Set(node, ActivationValue(std::move(joint)));
  return {};
}

// Blocks of pixels as channels, or back.
Result<void> Walk::Depth(const OnnxNode& node) {
  const Shape shape = ShapeOf(In(node, 0));
  const int64_t n = node.Int("blocksize", 0);
  const bool to_space = node.op == "DepthToSpace";
  if (shape.size() != 4 || n < 1 || n > 65536 ||
      (to_space ? shape[1] % (n * n) != 0
                : shape[2] % n != 0 || shape[3] % n != 0)) {
    return InvalidInput("expected images that blocks of " + std::to_string(n) +
                        " x " + std::to_string(n) + " pixels make up");
  }
  const int64_t c = shape[1] / (n * n);
  const bool depth_first = node.Text("mode", "DCR") == "DCR";
  Shape parts;
  Shape order;
  Shape result;
  if (to_space) {
    parts = depth_first ? Shape{shape[0], n, n, c, shape[2], shape[3]}
                        : Shape{shape[0], c, n, n, shape[2], shape[3]};
    order = depth_first ? Shape{0, 3, 4, 1, 5, 2} : Shape{0, 1, 4, 2, 5, 3};
    result = {shape[0], c, shape[2] * n, shape[3] * n};
  } else {
    parts = {shape[0], shape[1], shape[2] / n, n, shape[3] / n, n};
    order = {0, 3, 5, 1, 2, 4};
    result = {shape[0], shape[1] * n * n, shape[2] / n, shape[3] / n};
  }
  OnnxAttribute perm;
  perm.name = "perm";
  perm.ints = order;
  TESSERA_TRY(std::string y,
              Part(node, "Reshape", {node.inputs[0], IntsOf(node, parts)}));
  TESSERA_TRY(y, Part(node, "Transpose", {y}, {perm}));
  TESSERA_TRY(y, Part(node, "Reshape", {y, IntsOf(node, result)}));
  Rename(node, y);
  return {};
}

}  // namespace tessera::onnx
