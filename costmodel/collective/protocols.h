#pragma once
// The protocols by which NCCL carries out the sends of a collective, as
// numbers:
//   ll      data and flags in one 8-byte word: the least latency, and few
//           channels, hence little bandwidth;
//   ll128   flags in every 128 bytes: some latency, some bandwidth;
//   simple  a flag for a whole piece: the most latency, all the bandwidth.
// And "plain", none of them: the links alone. Ranks that share memory use it,
// and who asks for it by name.
//
// The figures are fitted to measured collectives by tools/fit_collectives.py,
// which writes them to fitted_protocols.h.

#include <span>
#include <string_view>

#include "costmodel/collective/algorithms.h"
#include "planner/base/units.h"

namespace tessera {

struct Protocol {
  std::string_view name;
  double start_s = 0;         // once, beside the links' own start
  double host_step_s = 0;     // of each send within a host, beside latencies
  double network_step_s = 0;  // of each send between hosts
  double fraction = 1;        // of the links' bandwidth that is reached
  // How much is sent on at once; matters where whole pieces are waited for
  // (Rounds::whole_pieces).
  Bytes piece;
  // A rank copies its own share of the payload (Rounds::own_share) at its
  // links' bandwidth over this: where GPUs meet on a switch, the cores that
  // copy are made to fill the links and have little to spare. So two A100 reach
  // 0.7 of what eight do in an all-gather, where half of the payload is their
  // own.
  double own_copy = 0;
};

// Those that an algorithm of `pattern` may use.
std::span<const Protocol> ProtocolsOf(SendPattern pattern);

// "plain".
std::span<const Protocol> PlainProtocol();

}  // namespace tessera
