#pragma once
// How far MatmulSeconds is off for products of like shape, as those of a
// profile tell: rows of a kernel of class kMatmul for that kernel, fused ones
// too, which `tessera profile` times amid load; and for all others rows named
// "product" of the rule "bmk,bnk->bmn", whoever's kernel they were, timed after
// a pause.
//
// Of the shape (batch, m, n, k), with d the distance to a row in octaves (the
// root of the sum of squared differences of the four binary logarithms):
//   log factor = sum over rows w(d) log(measured / MatmulSeconds) / (sum w + p)
//   w(d)       = 1 / (d^2 + 0.1)^3, p = 0.05
// Both numbers are choices, fitted to nothing: rows within a third of an octave
// (the root of 0.1) count nearly alike, and the model counts as a row does that
// is 1.6 octaves away (where w is p).
// At a row this is what was measured, between rows a mean of the nearest
// (Shepard 1968), and two octaves from any the model alone counts for most. It
// is continuous, but not monotone where measurements are not.
//
// Thread-safe: const after construction.

#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "costmodel/profile/profile_db.h"
#include "costmodel/source/kernel_time.h"
#include "planner/ir/cluster.h"

namespace tessera {

inline constexpr std::string_view kProductName = "product";
inline constexpr std::string_view kProductRule = "bmk,bnk->bmn";

class MeasuredProducts {
 public:
  // Other rows, and those of devices without kernel times, are left out.
  // `profile` may be null.
  MeasuredProducts(const ProfileDb* profile,
                   std::span<const DeviceType> device_types);

  // By what MatmulSeconds of a product that is not rounded is to be multiplied:
  // by the rows of that name. Nothing where the device has none of elements of
  // this size: bf16 and fp16 products take the same time.
  std::optional<double> Factor(std::string_view name, std::string_view device,
                               DType dtype, const MatmulShape& shape) const;

 private:
  struct Row {
    MatmulShape at;  // binary logarithms of the extents
    double log_factor = 0;
  };
  void Add(const ProfileKey& key, const Measurement& measured,
           const DeviceType& device);

  // By name, device and bytes of an element.
  std::map<std::tuple<std::string, std::string, int64_t>, std::vector<Row>>
      rows_;
};

}  // namespace tessera
