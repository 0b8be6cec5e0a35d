#pragma once
// A config.json while it is read: values by key, with the type that the caller
// expects. The first problem is kept and returned by Check, so that a reader is
// a list of keys and one check. A copyable value; not for several threads.

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/io/json_value.h"

namespace tessera {

// The name of the model whose config is at `path`: the file's, or of its folder
// where it is a config.json, as most are called; or in the zoo.
std::string GraphName(const std::string& path);

// Of a model that is a pipe or a device.
Error NotRegular(const std::string& path);

// The deepest published transformers have 1,000 layers (Wang et al. 2022,
// "DeepNet").
inline constexpr int64_t kMostModelLayers = 4096;

class ModelConfig {
 public:
  ModelConfig(std::string path, JsonValue values);

  // Whether `key` is there and not null.
  bool Has(std::string_view key) const;
  // The value of `key`, of any kind; null where there is none.
  const JsonValue& Value(std::string_view key) const;

  // A whole number of at least 1. The first form is an error where the key is
  // missing or null, the second returns `fallback`, which is the default of
  // the model's class in transformers.
  int64_t Size(std::string_view key);
  // The number of layers, within what can be planned.
  int64_t Layers(std::string_view key);
  int64_t Size(std::string_view key, int64_t fallback);
  // Finite, within [least, most].
  double Number(std::string_view key, double fallback, double least,
                double most);
  // A list of `count` such numbers. An error where the key is missing or null.
  std::vector<double> Numbers(std::string_view key, size_t count, double least,
                              double most);
  // A list of whole numbers, each and their count within limits. Where the key
  // is missing or null it is `fallback`, and where that is empty and there must
  // be items an error.
  struct ListLimits {
    size_t least_items = 1;
    size_t most_items = 0;
    int64_t least = 1;
    int64_t most = 0;
  };
  std::vector<int64_t> WholeNumbers(std::string_view key,
                                    const ListLimits& limits,
                                    std::vector<int64_t> fallback = {});
  // A list of strings; an empty one where the key is missing or null.
  std::vector<std::string> Strings(std::string_view key);
  bool Bool(std::string_view key, bool fallback);
  std::string String(std::string_view key, std::string_view fallback);

  // An error unless `key` is missing, null or false.
  void Refuse(std::string_view key);
  // Adds an error about `key`, which names the place.
  void Wrong(std::string_view key, std::string message);

  const std::string& path() const { return path_; }
  const JsonValue& values() const { return values_; }
  // The first problem so far.
  Result<void> Check() const;
  // The keys that were asked for, there or not.
  const std::set<std::string, std::less<>>& asked() const { return asked_; }

 private:
  const JsonValue* Find(std::string_view key) const;
  int64_t WholeNumber(std::string_view key, int64_t most);
  // The items of `value`, which is that of `key`; an error unless it is a list.
  const std::vector<JsonValue>& ItemsOf(std::string_view key,
                                        const JsonValue& value);

  std::string path_;
  JsonValue values_;
  std::optional<Error> error_;
  mutable std::set<std::string, std::less<>> asked_;
};

}  // namespace tessera
