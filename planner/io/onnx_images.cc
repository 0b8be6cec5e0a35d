// Nodes that compute images: convolutions, pooling, norms and joints.

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

namespace {

// Channels that a node makes as one dimension, or in its own groups, for
// another to take apart; an image's other dimensions are -1 and -2 until they
// have names.
constexpr int kWholeChannels = -100;

// Whether the channels of images are (groups, channels of a group).
bool InGroups(const Activation& x) {
  return x.dims[1].size() == 2;
}

// Their letters in rules.
std::string ChannelsOf(const Activation& x) {
  return InGroups(x) ? "gc" : "c";
}

// Letters of the image, the window and its places in rules; signals have no
// height (planner/ops/window.h).
struct Directions {
  std::string image;
  std::string window;
  std::string places;
};
Directions DirectionsOf(const Activation& x) {
  if (x.dims.size() == 4) return {"h!w!", "k!l!", "yx"};
  return {"w!", "l!", "x"};
}

std::pair<WindowPlaces, WindowPlaces> HeightAndWidth(
    std::span<const WindowPlaces> places) {
  return {places.size() == 2 ? places[0] : WindowPlaces(), places.back()};
}

void AddWindow(std::span<const WindowPlaces> places,
               std::vector<Attribute>& attributes) {
  const auto [y, x] = HeightAndWidth(places);
  attributes.insert(attributes.end(), {{"pad_left", Number(x.pad)},
                                       {"pad_top", Number(y.pad)},
                                       {"stride_height", Number(y.stride)},
                                       {"stride_width", Number(x.stride)}});
}
void AddDilations(std::span<const WindowPlaces> places,
                  std::vector<Attribute>& attributes) {
  const auto [y, x] = HeightAndWidth(places);
  attributes.insert(attributes.end(), {{"dilation_height", Number(y.dilation)},
                                       {"dilation_width", Number(x.dilation)}});
}

}  // namespace

Result<Activation> Walk::Image(const OnnxNode& node, size_t i, bool features) {
  TESSERA_TRY(Activation x, Computed(node, i));
  TESSERA_TRY(x, Contiguous(node, std::move(x)));
  const size_t rank = x.dims.size();
  if (rank >= (features ? 2 : 3) && rank <= 4 && x.dims[0].size() == 1 &&
      SameAtoms(Flatten(x.dims), x.own)) {
    for (size_t d = 1; d < rank; ++d) {
      if (d == 1 && InGroups(x)) continue;
      TESSERA_TRY(x, Joined(node, std::move(x), d));
    }
    return x;
  }
  return InvalidInput(
      "expected images, [samples, channels, height, width], or signals, "
      "[samples, channels, length], found " +
      TextOf(ShapeOf(ActivationValue(x))));
}

Result<std::vector<WindowPlaces>> Walk::WindowOf(const OnnxNode& node,
                                                 const Shape& window) {
  const size_t directions = window.size();
  const std::vector<int64_t> ones(directions, 1);
  const std::vector<int64_t> strides = node.Ints("strides", ones);
  const std::vector<int64_t> dilations = node.Ints("dilations", ones);
  const std::vector<int64_t> pads =
      node.Ints("pads", std::vector<int64_t>(2 * directions, 0));
  bool fits = (directions == 1 || directions == 2) &&
              strides.size() == directions && dilations.size() == directions &&
              pads.size() == 2 * directions;
  const auto small = [](int64_t value, int64_t least) {
    return value >= least && value <= 65536;
  };
  std::vector<WindowPlaces> places;
  for (size_t d = 0; fits && d < directions; ++d) {
    fits = small(strides[d], 1) && small(window[d], 1) &&
           small(dilations[d], 1) && small(pads[d], 0) &&
           small(pads[d + directions], 0);
    places.push_back({.count = 0,
                      .pad = pads[d],
                      .behind = pads[d + directions],
                      .stride = strides[d],
                      .window = window[d],
                      .dilation = dilations[d]});
  }
  if (fits) return places;
  return InvalidInput(
      "expected a window in one or two dimensions with strides, padding and "
      "dilations of up to 65536");
}

Result<std::vector<WindowPlaces>> Walk::PlacesIn(const OnnxNode& node,
                                                 const Activation& x,
                                                 const Shape& window) {
  TESSERA_TRY(std::vector<WindowPlaces> places, WindowOf(node, window));
  if (places.size() + 2 != x.dims.size()) {
    return InvalidInput("its window does not have the dimensions of " +
                        TextOf(ShapeOf(ActivationValue(x))));
  }
  const std::string automatic = node.Text("auto_pad", "NOTSET");
  for (size_t d = 0; d < places.size(); ++d) {
    WindowPlaces& p = places[d];
    const int64_t image = Extent(x.dims[d + 2]);
    const int64_t reach = p.dilation * (p.window - 1) + 1;
    if (automatic == "SAME_UPPER" || automatic == "SAME_LOWER") {
      const int64_t count = (image + p.stride - 1) / p.stride;
      const int64_t all =
          std::max<int64_t>(0, (count - 1) * p.stride + reach - image);
      p.pad = automatic == "SAME_UPPER" ? all / 2 : all - all / 2;
      p.behind = all - p.pad;
    } else if (automatic == "VALID") {
      p.pad = p.behind = 0;
    } else if (automatic != "NOTSET" && !automatic.empty()) {
      return InvalidInput("unknown auto_pad '" + automatic + "'");
    }
    const int64_t room = image + p.pad + p.behind - reach;
    if (room < 0) return InvalidInput("the window is larger than the image");
    p.count = room / p.stride + 1;
    // A window that would begin in the padding behind is left out.
    if (node.Int("ceil_mode", 0) != 0 && room % p.stride != 0 &&
        p.count * p.stride < image + p.pad) {
      ++p.count;
    }
  }
  return places;
}

Result<Activation> Walk::Made(const OnnxNode& node, TensorId tensor,
                              const Activation& x, const Dim& channels,
                              const Shape& extents) {
  Activation y;
  y.tensor = tensor;
  y.dims = {x.dims[0], channels};
  y.dims.resize(2 + extents.size());
  y.own = Flatten(y.dims);
  const size_t front = y.own.size();
  y.own.resize(front + extents.size());
  for (size_t i = 0; i < extents.size(); ++i) {
    y.own[front + i] = {-1 - static_cast<int>(i), extents[i], 'f'};
  }
  // From the back, so that places in front stay where they are.
  for (size_t i = extents.size(); i-- > 0;) {
    // A sequence stays one.
    TESSERA_TRY(y, WithDim(node, std::move(y), 2 + i, front + i,
                           AtomOf(node, i + 1 < extents.size() ? "h" : "w"),
                           extents[i], x.dims[2 + i][0].letter));
  }
  if (channels[0].id != kWholeChannels) return y;
  if (channels.size() > 1) {
    TESSERA_TRY(y, Merged(node, std::move(y), 1));
  }
  return WithDim(node, std::move(y), 1, 1, AtomOf(node, "c"), Extent(channels),
                 'c');
}

Result<void> Walk::Pool(const OnnxNode& node, std::string_view op,
                        std::vector<Attribute> more) {
  TESSERA_TRY(Activation x, Image(node, 0));
  TESSERA_TRY(std::vector<WindowPlaces> places,
              PlacesIn(node, x, node.Ints("kernel_shape", {})));
  const bool dilated = std::ranges::any_of(
      places, [](const WindowPlaces& p) { return p.dilation != 1; });
  if (dilated || node.Int("storage_order", 0) != 0 || node.outputs.size() > 1) {
    return InvalidInput(
        "dilations, indices and column-major order are not supported");
  }
  // The operator counts as many places behind the image as in front of it.
  const bool counts_pad = node.Int("count_include_pad", 0) != 0;
  for (size_t i = 0; counts_pad && i < places.size(); ++i) {
    WindowPlaces& p = places[i];
    if (p.pad == p.behind) continue;
    TESSERA_TRY(x, Padded(node, std::move(x), i + 2, p.pad, p.behind, 0));
    p.pad = 0;
  }
  const Directions in = DirectionsOf(x);
  Shape counts;
  for (const WindowPlaces& p : places) counts.push_back(p.count);
  const auto [y, z] = HeightAndWidth(places);
  AddWindow(places, more);
  more.insert(more.end(), {{"out_height", Number(y.count)},
                           {"out_width", Number(z.count)},
                           {"window_height", Number(y.window)},
                           {"window_width", Number(z.window)}});
  const std::string rows = "b" + ChannelsOf(x);
  const TensorId result =
      builder_.Add1(op, Unique(NameOf(node)), {x.tensor},
                    rows + in.image + "->" + rows + in.places, std::move(more));
  TESSERA_TRY(Activation made, Made(node, result, x, x.dims[1], counts));
  Set(node, ActivationValue(std::move(made)));
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

bool Walk::IsClassToken(const std::string& name, int64_t features,
                        const OnnxNode& joint) {
  std::string token = name;
  for (const std::string_view op : {"Expand", "Tile"}) {
    const OnnxNode* const repeats = Producer(name, op);
    if (repeats == nullptr || repeats->inputs.empty()) continue;
    token = repeats->inputs[0];
    if (OnlyReader(name, "Concat") != &joint) return false;
  }
  const auto found = values_.find(token);
  return found != values_.end() && found->second.Is(Value::Kind::kWeight) &&
         ShapeOf(found->second) == Shape{1, 1, features};
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
      !IsClassToken(joined->inputs[0], window[0], *joined) ||
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
      "patches", {sizes_.batch, seq_len_, shape[1], shape[2], shape[3]},
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
    TESSERA_RETURN_IF_ERROR(
        add(".bias", AsWeight(In(conv, 2)), {0}, "patch_rows"));
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
  const Value w = AsWeight(In(node, 1));
  const Shape shape = ShapeOf(w);
  const int64_t groups = node.Int("group", 1);
  const int64_t read = Extent(x.dims[1]);
  if (!w.Is(Value::Kind::kWeight) || shape.size() < 3) {
    return InvalidInput("expected a window that is a tensor of the file");
  }
  if (groups < 1 || shape[0] < 1 || shape[1] < 1 || shape[0] % groups != 0 ||
      read % groups != 0 || shape[1] != read / groups) {
    return InvalidInput("reads " + std::to_string(read) +
                        " channels: its weight has " + TextOf(shape) + " in " +
                        std::to_string(groups) + " groups");
  }
  const Shape of_window(shape.begin() + 2, shape.end());
  TESSERA_TRY(const std::vector<WindowPlaces> places,
              PlacesIn(node, x, of_window));
  TESSERA_TRY(const Dim channels, ChannelsFor(node, x, shape[0], groups));
  Shape counts;
  for (const WindowPlaces& p : places) counts.push_back(p.count);
  const bool grouped = groups > 1;
  const Directions letters = DirectionsOf(x);
  const std::string in = ChannelsOf(x);
  const std::string out = channels.size() == 1 ? "o" : grouped ? "gn" : "pn";
  Shape window = ExtentsOf(channels);
  const Shape made = window;
  for (const Atom& atom : std::span(x.dims[1]).subspan(grouped ? 1 : 0)) {
    window.push_back(atom.extent);
  }
  window.insert(window.end(), of_window.begin(), of_window.end());
  // He et al. (2015), over the outputs.
  double outputs = Number(shape[0] / groups);
  for (int64_t extent : of_window) outputs *= Number(extent);
  std::vector<size_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  TESSERA_TRY(const TensorId weight,
              Weight(w, std::move(order), window, std::sqrt(2 / outputs)));
  std::vector<TensorId> operands = {x.tensor, weight};
  std::string rule = "b" + in + letters.image + "," + out +
                     (grouped ? "c" : in) + letters.window;
  if (Has(node, 2)) {
    if (ShapeOf(In(node, 2)) != Shape{shape[0]}) {
      return InvalidInput("its bias is not one number for each channel");
    }
    TESSERA_TRY(const TensorId bias, BiasOf(AsWeight(In(node, 2)), w, made));
    operands.push_back(bias);
    rule += "+" + out;
  }
  const auto [y, z] = HeightAndWidth(places);
  std::vector<Attribute> attributes = {{"out_height", Number(y.count)},
                                       {"out_width", Number(z.count)}};
  AddWindow(places, attributes);
  AddDilations(places, attributes);
  const TensorId result =
      builder_.Add1("conv2d", Unique(NameOf(node)), operands,
                    rule + "->b" + out + letters.places, std::move(attributes));
  TESSERA_TRY(Activation images, Made(node, result, x, channels, counts));
  Set(node, ActivationValue(std::move(images)));
  return {};
}

Result<Dim> Walk::ChannelsFor(const OnnxNode& node, Activation& x,
                              int64_t channels, int64_t groups) {
  Dim made = atoms_.Make(AtomOf(node, "c"), channels, 'c');
  if (groups == 1) {
    if (x.dims[1].size() + made.size() <= 3) return made;
    return Dim{{kWholeChannels, channels, 'c'}};
  }
  // Both sides have the groups as a dimension of their own.
  const auto fits = [&](const Dim& dim) {
    return dim.size() == 2 && dim[0].extent == groups;
  };
  if (x.dims[1].size() > 1 && !fits(x.dims[1])) {  // a neighbour's groups
    TESSERA_TRY(x, Merged(node, std::move(x), 1));
    const int64_t all = x.dims[1][0].extent;
    TESSERA_TRY(
        x, WithDim(node, std::move(x), 1, 1, AtomOf(node, "groups"), all, 'c'));
  }
  if (x.dims[1].size() == 1) {
    const Atom whole = x.dims[1][0];
    x.dims[1] = atoms_.Split(whole, groups);
    ReplaceIn(x.own, whole, x.dims[1]);
  }
  if (made.size() == 1) made = atoms_.Split(made[0], groups);
  if (fits(made)) return made;
  return Dim{{kWholeChannels, groups, 'c'},
             {kWholeChannels - 1, channels / groups, 'c'}};
}

// The weight is (in, out of a group, window).
Result<void> Walk::TransposedConvolution(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Image(node, 0));
  const Value w = AsWeight(In(node, 1));
  const Shape shape = ShapeOf(w);
  const int64_t groups = node.Int("group", 1);
  const int64_t read = Extent(x.dims[1]);
  if (!w.Is(Value::Kind::kWeight) || shape.size() != x.dims.size()) {
    return InvalidInput(
        "expected a window of the image's dimensions, a tensor of the file");
  }
  if (groups < 1 || shape[0] != read || shape[1] < 1 || read % groups != 0) {
    return InvalidInput("reads " + std::to_string(read) +
                        " channels: its weight has " + TextOf(shape) + " in " +
                        std::to_string(groups) + " groups");
  }
  const Shape of_window(shape.begin() + 2, shape.end());
  TESSERA_TRY(std::vector<WindowPlaces> places, WindowOf(node, of_window));
  const size_t directions = places.size();
  const std::vector<int64_t> more =
      node.Ints("output_padding", std::vector<int64_t>(directions, 0));
  const std::vector<int64_t> sizes = node.Ints("output_shape", {});
  const std::string automatic = node.Text("auto_pad", "NOTSET");
  const bool same = automatic == "SAME_UPPER" || automatic == "SAME_LOWER";
  if (more.size() != directions ||
      (!sizes.empty() && sizes.size() != directions)) {
    return InvalidInput("its padding does not fit its window");
  }
  Shape image;
  for (size_t d = 0; d < directions; ++d) {
    WindowPlaces& p = places[d];
    const int64_t count = Extent(x.dims[d + 2]);
    const int64_t whole =
        p.stride * (count - 1) + p.dilation * (p.window - 1) + 1 + more[d];
    if (same || !sizes.empty()) {
      image.push_back(!sizes.empty() ? sizes[d] : count * p.stride);
      const int64_t all = std::max<int64_t>(0, whole - image[d]);
      p.pad = automatic == "SAME_UPPER" ? all / 2 : all - all / 2;
    } else {
      if (automatic == "VALID") p.pad = p.behind = 0;
      image.push_back(whole - p.pad - p.behind);
    }
    if (more[d] < 0 || image[d] < 1 || image[d] > 1 << 30) {
      return InvalidInput("makes an image of " + std::to_string(image[d]) +
                          " along dimension " + std::to_string(d + 2));
    }
  }
  TESSERA_TRY(const Dim channels,
              ChannelsFor(node, x, shape[1] * groups, groups));
  const bool grouped = groups > 1;
  const Directions letters = DirectionsOf(x);
  const std::string in = grouped ? "gn" : InGroups(x) ? "pn" : "n";
  const std::string out = channels.size() == 1 ? "c" : grouped ? "gc" : "oc";
  Shape window = ExtentsOf(x.dims[1]);
  for (const Atom& atom : std::span(channels).subspan(grouped ? 1 : 0)) {
    window.push_back(atom.extent);
  }
  window.insert(window.end(), of_window.begin(), of_window.end());
  double outputs = Number(shape[1]);
  for (int64_t extent : of_window) outputs *= Number(extent);
  std::vector<size_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  TESSERA_TRY(const TensorId weight,
              Weight(w, std::move(order), window, std::sqrt(2 / outputs)));
  std::vector<Attribute> attributes = {
      {"image_height", Number(directions == 2 ? image[0] : 1)},
      {"image_width", Number(image.back())}};
  AddWindow(places, attributes);
  AddDilations(places, attributes);
  const std::string name = NameOf(node);
  TensorId result = builder_.Add1(
      "conv_transpose2d", Unique(name), {x.tensor, weight},
      "b" + in + letters.places + "," + in + (grouped ? "c" : out) +
          letters.window + "->b" + out + letters.image,
      std::move(attributes));
  if (Has(node, 2)) {
    if (ShapeOf(In(node, 2)) != Shape{shape[1] * groups}) {
      return InvalidInput("its bias is not one number for each channel");
    }
    TESSERA_TRY(const TensorId bias,
                Weight(AsWeight(In(node, 2)), {0}, ExtentsOf(channels), 0));
    const std::string all = "b" + out + (directions == 2 ? "hw" : "w");
    result = builder_.Add1("broadcast_add", Unique(name + ".bias"),
                           {result, bias}, all + "," + out + "->" + all);
  }
  TESSERA_TRY(Activation y, Made(node, result, x, channels, image));
  Set(node, ActivationValue(std::move(y)));
  return {};
}

Result<void> Walk::BatchNorm(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Image(node, 0, /*features=*/true));
  const Shape all = {Extent(x.dims[1])};
  std::array<Value, 5> given;  // scale and shift, mean and variance
  for (size_t i = 1; i < given.size(); ++i) given[i] = AsWeight(In(node, i));
  if (ShapeOf(given[1]) != all || ShapeOf(given[2]) != all) {
    return InvalidInput(
        "its scale or shift is not one number for each channel");
  }
  const Shape shape = ExtentsOf(x.dims[1]);
  TESSERA_TRY(const TensorId scale, Weight(given[1], {0}, shape, 0, 1));
  TESSERA_TRY(const TensorId shift, Weight(given[2], {0}, shape, 0));
  const std::string c = ChannelsOf(x);
  constexpr std::string_view kPlaces[] = {"", "w", "hw"};
  const std::string images = "b" + c + std::string(kPlaces[x.dims.size() - 2]);
  std::vector<TensorId> operands = {x.tensor, scale, shift};
  std::string op = "batch_norm";
  std::string rule = images + "," + c + "," + c;
  std::vector<Attribute> attributes = {
      {"epsilon", node.Float("epsilon", 1e-5)}};
  const auto is_average = [&](const Value& value) {
    return value.Is(Value::Kind::kWeight) && ShapeOf(value) == all;
  };
  if (is_average(given[3]) && is_average(given[4])) {
    for (const size_t operand : {3, 4}) {
      averages_.insert(given[operand].weight);
      TESSERA_TRY(operands.emplace_back(),
                  Weight(given[operand], {0}, shape, 0, operand == 4 ? 1 : 0));
      buffers_.erase(given[operand].weight);  // as it should be
      rule += "," + c;
    }
    op = "tracked_" + op;
    attributes.push_back({"momentum", 1 - node.Float("momentum", 0.9)});
  }
  rule += "->" + images;
  const auto groups = options_.overrides.find(kBatchNormGroups);
  if (groups != options_.overrides.end() && groups->second.number > 1) {
    op.insert(op.find("batch"), "ghost_");
    attributes.push_back({"groups", groups->second.number});
    rule += ",b" + c + ",b" + c;
  } else {
    rule += "," + c + "," + c;
  }
  x.tensor = builder_.Add1(op, Unique(NameOf(node)), std::move(operands), rule,
                           std::move(attributes));
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
  if (ShapeOf(In(node, 0)).size() == 4) return MeanOfImage(node);
  return ReducedPlaces(node, "ReduceMean");
}

Result<void> Walk::GlobalMaxPool(const OnnxNode& node) {
  return ReducedPlaces(node, "ReduceMax");
}

Result<void> Walk::ReducedPlaces(const OnnxNode& node,
                                 const std::string& reduction) {
  std::vector<int64_t> axes(ShapeOf(In(node, 0)).size());
  std::iota(axes.begin(), axes.end(), 0);
  axes.erase(axes.begin(),
             axes.begin() + std::min<int64_t>(2, std::ssize(axes)));
  OnnxAttribute over;
  over.name = "axes";
  over.ints = axes;
  TESSERA_TRY(const std::string y,
              Part(node, reduction, {node.inputs[0]}, {over}));
  Rename(node, y);
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
