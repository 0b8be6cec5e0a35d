// Convolutional networks as a list of layers, "model_type": "cnn". The format
// is Tessera's own, docs/models.md describes it: layers are lines of words, or
// objects that hold layers.

#include <algorithm>
#include <charconv>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/base/table.h"
#include "planner/base/whole_number.h"
#include "planner/io/huggingface.h"
#include "planner/io/vision.h"

namespace tessera {
namespace {

// A line of words: the kind of the layer, numbers, and words that take a value.
class Line {
 public:
  explicit Line(std::string_view text) {
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find(' ', begin), text.size());
      if (end > begin) words_.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
  }

  std::string_view kind() const { return words_.empty() ? "" : words_[0]; }

  // The number behind the kind at `place`, from 1; "SIZExSIZE" is two.
  std::optional<std::pair<int64_t, int64_t>> Sizes(size_t place) {
    if (place >= words_.size()) return std::nullopt;
    read_ = std::max(read_, place + 1);
    return ParseSizes(words_[place]);
  }
  // What stands behind the word, or `fallback` where it is not there.
  std::optional<std::pair<int64_t, int64_t>> After(
      std::string_view word, std::pair<int64_t, int64_t> fallback) {
    for (size_t i = read_; i + 1 < words_.size(); ++i) {
      if (words_[i] != word) continue;
      taken_ += 2;
      return ParseSizes(words_[i + 1]);
    }
    return fallback;
  }
  bool Has(std::string_view word) {
    for (size_t i = read_; i < words_.size(); ++i) {
      if (words_[i] != word) continue;
      ++taken_;
      return true;
    }
    return false;
  }
  std::optional<double> Fraction(size_t place) {
    if (place >= words_.size()) return std::nullopt;
    read_ = std::max(read_, place + 1);
    double value = 0;
    const char* const end = words_[place].data() + words_[place].size();
    const auto [at, code] = std::from_chars(words_[place].data(), end, value);
    if (code != std::errc() || at != end || value < 0 || value > 0.99) {
      return std::nullopt;
    }
    return value;
  }
  // Whether every word was asked for.
  bool AllRead() const { return read_ + taken_ == words_.size(); }

 private:
  static std::optional<std::pair<int64_t, int64_t>> ParseSizes(
      std::string_view word) {
    const size_t cross = word.find('x');
    const auto number = [](std::string_view digits) -> std::optional<int64_t> {
      const auto value = ParseWhole<int64_t>(digits);
      return value && *value >= 0 && *value <= 65536 ? value : std::nullopt;
    };
    const auto first = number(word.substr(0, cross));
    const auto second = cross == std::string_view::npos
                            ? first
                            : number(word.substr(cross + 1));
    if (!first || !second) return std::nullopt;
    return std::pair(*first, *second);
  }

  std::vector<std::string_view> words_;
  size_t read_ = 1;   // words in order
  size_t taken_ = 0;  // words by name
};

using Sizes = std::pair<int64_t, int64_t>;

struct LayerKind {
  std::string_view name;
  std::string_view form;
};

constexpr LayerKind kKinds[] = {
    {"conv", "conv CHANNELS WINDOW [stride N] [pad N] [dilation N] [no-bias]"},
    {"conv-norm-relu",
     "conv-norm-relu CHANNELS WINDOW [stride N] [pad N] [dilation N]"},
    {"batch-norm", "batch-norm"},
    {"relu", "relu"},
    {"max-pool", "max-pool WINDOW [stride N] [pad N] [ceil]"},
    {"average-pool", "average-pool WINDOW [stride N] [pad N] [ceil]"},
    {"mean", "mean"},
    {"dropout", "dropout PROBABILITY"},
    {"linear", "linear CHANNELS"},
    {"classifier", "classifier"},
};

// Of an object, besides "name".
constexpr std::string_view kKeys[] = {"layers", "branches", "residual",
                                      "auxiliary"};

class Reader {
 public:
  struct Auxiliary {
    std::string name;
    Features logits;
  };

  Reader(ModelConfig& config, Vision& model, const ImageSizes& sizes,
         const BatchNormOptions& norm)
      : config_(config), model_(model), sizes_(sizes), norm_(norm) {}

  // `inside`: of an object that is a block of its own.
  Features Layers(const std::string& prefix, const JsonValue& list, Features x,
                  bool inside) {
    if (list.kind != JsonValue::Kind::kArray || list.items.empty()) {
      Wrong(prefix, "expected a list of layers");
      return x;
    }
    for (size_t i = 0; i < list.items.size(); ++i) {
      if (failed_) return x;
      const JsonValue& item = list.items[i];
      const std::string name =
          (prefix.empty() ? "" : prefix + ".") + std::to_string(i);
      x = item.kind == JsonValue::Kind::kString
              ? Layer(name, item.text, x, inside)
              : Object(prefix, name, item, x, inside);
      if (!failed_ && !model_.problem().empty()) {
        Wrong("", model_.problem());
      }
    }
    return x;
  }

  // Of the heads beside the list's own.
  const std::vector<Auxiliary>& auxiliary() const { return auxiliary_; }

 private:
  void Wrong(const std::string& name, const std::string& message) {
    if (!failed_) {
      config_.Wrong("layers", name.empty() ? message : name + ": " + message);
    }
    failed_ = true;
  }

  void Begin(const std::string& name, bool inside) {
    if (!inside) model_.BeginBlock(name);
  }

  Features Object(const std::string& prefix, const std::string& name,
                  const JsonValue& item, const Features& x, bool inside) {
    if (item.fields.empty()) {
      Wrong(name, "is " + item.ToString() + ": expected a layer or an object");
      return x;
    }
    const std::string own = item.Field("name").text;
    const std::string path =
        own.empty() ? name : (prefix.empty() ? own : prefix + "." + own);
    const std::string key = KeyOf(path, item);
    if (failed_) return x;
    const JsonValue& value = item.Field(key);
    if (key == "layers") return Layers(path, value, x, inside);
    Begin(path, inside);
    if (key == "branches") {
      std::vector<Features> ends;
      for (size_t i = 0; i < value.items.size() && !failed_; ++i) {
        Append(path + "." + std::to_string(i), value.items[i], x, ends);
      }
      if (!failed_ && ends.size() < 2) Wrong(path, "expected branches");
      return failed_ ? x : model_.Concat(path, ends);
    }
    if (key == "residual") {
      const Features y = Layers(path, value, x, true);
      return failed_ ? x : model_.Add(path + ".add", y, x);
    }
    const Features logits = Layers(path, value, x, true);
    if (!failed_) auxiliary_.push_back({path, logits});
    return x;
  }

  // What an object is of, its one key besides the name.
  std::string KeyOf(const std::string& path, const JsonValue& item) {
    std::vector<std::string> keys;
    for (const auto& [key, value] : item.fields) {
      if (key != "name") keys.push_back(key);
    }
    const auto unknown = std::ranges::find_if(keys, [](const auto& key) {
      return std::ranges::count(kKeys, key) == 0;
    });
    if (unknown != keys.end()) {
      Wrong(path, "unknown key '" + *unknown +
                      "'; known: name, layers, branches, residual, auxiliary");
    } else if (keys.empty()) {
      Wrong(path, "expected layers, branches, residual or auxiliary");
    } else if (keys.size() > 1) {
      Wrong(path, "has the keys '" + keys[0] + "' and '" + keys[1] +
                      "': expected one of them");
    }
    return keys.empty() ? "" : keys[0];
  }

  // A branch; one that ends in branches ends in all of theirs.
  void Append(const std::string& path, const JsonValue& list, Features x,
              std::vector<Features>& ends) {
    JsonValue front = list;
    JsonValue last;
    if (!front.items.empty() &&
        front.items.back().fields.contains("branches")) {
      last = front.items.back().Field("branches");
      KeyOf(path + "." + std::to_string(front.items.size() - 1),
            front.items.back());
      front.items.pop_back();
    }
    if (failed_) return;
    if (list.kind == JsonValue::Kind::kArray && list.items.empty()) {
      ends.push_back(x);  // the input itself
      return;
    }
    if (!front.items.empty() || last.is_null()) {
      x = Layers(path, front, x, true);
    }
    if (last.is_null()) {
      ends.push_back(x);
      return;
    }
    for (size_t i = 0; i < last.items.size() && !failed_; ++i) {
      Append(path + "." + std::to_string(front.items.size() + i), last.items[i],
             x, ends);
    }
  }

  Features Layer(const std::string& name, const std::string& text,
                 const Features& x, bool inside) {
    Line line(text);
    const auto kind =
        Find("layer", std::span<const LayerKind>(kKinds), line.kind());
    if (!kind) {
      Wrong(name, kind.error().message);
      return x;
    }
    const auto bad = [&] {
      Wrong(name,
            "is \"" + text + "\": expected " + std::string((*kind)->form));
      return x;
    };
    const std::string_view is = (*kind)->name;
    Features y = x;
    if (is == "conv" || is == "conv-norm-relu") {
      const auto channels = line.Sizes(1);
      const auto window = WindowOf(line, 2, {1, 1});
      const bool bias = is == "conv" && !line.Has("no-bias");
      if (!channels || channels->first < 1 ||
          channels->first != channels->second || !window || !line.AllRead()) {
        return bad();
      }
      Begin(name, inside);
      if (is == "conv") {
        return model_.Convolution(name, x, channels->first, *window, bias);
      }
      y = model_.Convolution(name + ".conv", x, channels->first, *window,
                             false);
      y = model_.BatchNorm(name + ".bn", y, norm_);
      return model_.Relu(name + ".relu", y);
    }
    if (is == "max-pool" || is == "average-pool") {
      // The stride is the window's, as in PyTorch.
      const auto size = Line(text).Sizes(1);
      auto window = WindowOf(line, 1, size.value_or(Sizes{1, 1}));
      if (!window) return bad();
      window->ceil = line.Has("ceil");
      if (!line.AllRead()) return bad();
      return is == "max-pool" ? model_.MaxPool(name, x, *window)
                              : model_.AveragePool(name, x, *window);
    }
    if (is == "dropout") {
      const auto probability = line.Fraction(1);
      if (!probability || !line.AllRead()) return bad();
      return model_.Dropout(name, x, *probability);
    }
    if (is == "linear" || is == "classifier") {
      Sizes channels = {sizes_.labels, sizes_.labels};
      if (is == "linear") channels = line.Sizes(1).value_or(Sizes{0, 0});
      if (channels.first < 1 || channels.first != channels.second ||
          !line.AllRead()) {
        return bad();
      }
      Begin(name, inside);
      return model_.Linear(name, x, channels.first);
    }
    if (!line.AllRead()) return bad();
    if (is == "batch-norm") return model_.BatchNorm(name, x, norm_);
    if (is == "relu") return model_.Relu(name, x);
    return model_.Mean(name, x);
  }

  // The window at `place` of a line, and the words that go with it.
  static std::optional<Window> WindowOf(Line& line, size_t place,
                                        Sizes stride) {
    const auto size = line.Sizes(place);
    const auto step = line.After("stride", stride);
    const auto pad = line.After("pad", {0, 0});
    const auto dilation = line.After("dilation", {1, 1});
    if (!size || !step || !pad || !dilation || size->first < 1 ||
        size->second < 1 || step->first < 1 || step->first != step->second ||
        dilation->first < 1 || dilation->first != dilation->second) {
      return std::nullopt;
    }
    return Window{.height = size->first,
                  .width = size->second,
                  .stride = step->first,
                  .pad_height = pad->first,
                  .pad_width = pad->second,
                  .dilation = dilation->first};
  }

  ModelConfig& config_;
  Vision& model_;
  const ImageSizes sizes_;
  const BatchNormOptions norm_;
  bool failed_ = false;
  std::vector<Auxiliary> auxiliary_;
};

}  // namespace

Result<Graph> BuildCnn(ModelConfig& config, const ImportOptions& options) {
  const ImageSizes sizes = ReadImageSizes(config);
  BatchNormOptions norm = ReadBatchNorm(config, options);
  norm.epsilon = config.Number("norm_epsilon", norm.epsilon, 0, 1);
  const double share = config.Number("auxiliary_weight", 0.4, 1e-6, 1);
  if (!config.Has("layers")) {
    config.Wrong("layers", "missing: expected a list of layers");
  }
  TESSERA_RETURN_IF_ERROR(config.Check());
  Vision model(config, options, sizes);
  Reader reader(config, model, sizes, norm);
  const Features logits = reader.Layers("", config.Value("layers"),
                                        model.images(), /*inside=*/false);
  TESSERA_RETURN_IF_ERROR(config.Check());
  const auto check = [&](const std::string& path, const Features& ends) {
    if (ends.flat() && ends.channels == sizes.labels) return;
    config.Wrong("layers", path + "ends in " + std::to_string(ends.channels) +
                               (ends.flat() ? " features" : " images") +
                               ": expected one for each of " +
                               std::to_string(sizes.labels) + " labels");
  };
  check("", logits);
  for (const Reader::Auxiliary& auxiliary : reader.auxiliary()) {
    check(auxiliary.name + ": ", auxiliary.logits);
  }
  TESSERA_RETURN_IF_ERROR(config.Check());
  model.Loss("loss", logits, 1);
  for (const Reader::Auxiliary& auxiliary : reader.auxiliary()) {
    model.Loss(auxiliary.name + ".loss", auxiliary.logits, share);
  }
  return model.Finish();
}

}  // namespace tessera
