#pragma once
// Written by tools/fit_collectives.py; do not edit. Fitted on 2026-11-22 to the
// published measurements of collectives named in each row.

#include <array>

#include "costmodel/collective/protocols.h"

namespace tessera {

// Name; start; step within a host, between hosts; fraction; piece; own copy.
inline constexpr std::array kPipelineProtocols = {
    Protocol{"ll", 0, 0, 0, 0.02275, {0}, 0.6085},
    Protocol{"ll128", 0.0005407e-6, 0.1784e-6, 24.02e-6, 0.414, {0}, 0.6085},
    Protocol{
        "simple", 10.62e-6, 2.137e-6, 1.606e-6, 1, {int64_t{4194304}}, 0.6085},
};
inline constexpr std::array kExchangeProtocols = {
    Protocol{"ll", 0, 0, 0, 0.02275, {0}, 0.6085},
    Protocol{"simple", 6.978e-6, 0, 1.606e-6, 0.8692, {0}, 0.6085},
};
inline constexpr std::array kInSwitchProtocols = {
    Protocol{"simple", 73.09e-6, 0, 1.606e-6, 1, {int64_t{4194304}}},
};

}  // namespace tessera
