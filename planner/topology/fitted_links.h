#pragma once
// Written by tools/fit_collectives.py; do not edit. Fitted on 2026-11-22 to the
// published measurements of collectives named in each row.

#include <array>
#include <string_view>

namespace tessera {

struct FittedLink {
  std::string_view name;
  double bandwidth;            // bytes a second, per direction
  double latency_s;            // of one of the two links of a step
  double start_s;              // of a collective; negative: not fitted
  double in_switch_bandwidth;  // 0: the switch does not sum
  std::string_view source;
};

inline constexpr std::array kFittedLinks = {
    FittedLink{"nvlink3", 221.8e9, 0.524e-6, 9.502e-6, 0e9,
               "fitted 2026-11-22 to collectives of Vidur, aiconfigurator "
               "a100_sxm, aws, stas, vTrain"},
    FittedLink{"nvlink4", 392.3e9, 0.3675e-6, 5.072e-6, 303.5e9,
               "fitted 2026-11-22 to collectives of SimAI, Vidur, "
               "aiconfigurator h100_sxm, aiconfigurator h200_sxm, aws, dgxc, "
               "dgxh100, gcp, simumax, stas"},
    FittedLink{"nvlink5", 699.5e9, 0.5888e-6, 7.786e-6, 480.3e9,
               "fitted 2026-11-22 to collectives of aiconfigurator b200_sxm, "
               "aiconfigurator b300_sxm, stas, together"},
    FittedLink{"nvlink5-nvl72", 715.1e9, 0.5521e-6, 8.381e-6, 0e9,
               "fitted 2026-11-22 to collectives of aiconfigurator gb200, "
               "aiconfigurator gb300"},
    FittedLink{"efa-100g", 10.65e9, 34.13e-6, -1, 0e9,
               "fitted 2026-11-22 to collectives of aws"},
    FittedLink{"efa-4x100g", 42e9, 12.98e-6, -1, 0e9,
               "fitted 2026-11-22 to collectives of aws"},
    FittedLink{"efa-2x200g", 47e9, 7.796e-6, -1, 0e9,
               "fitted 2026-11-22 to collectives of aws"},
    FittedLink{"tcpxo-200g", 23.84e9, 14.36e-6, -1, 0e9,
               "fitted 2026-11-22 to collectives of gcp"},
    FittedLink{
        "ib-ndr", 49.06e9, 5.696e-6, -1, 0e9,
        "fitted 2026-11-22 to collectives of SimAI, Vidur, dgxh100, together"},
};

}  // namespace tessera
