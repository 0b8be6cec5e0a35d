#include "costmodel/collective/protocols.h"

#include <array>

#include "costmodel/collective/fitted_protocols.h"

namespace tessera {

std::span<const Protocol> ProtocolsOf(SendPattern pattern) {
  switch (pattern) {
    case SendPattern::kPipeline:
      return kPipelineProtocols;
    case SendPattern::kExchange:
      return kExchangeProtocols;
    case SendPattern::kInSwitch:
      return kInSwitchProtocols;
  }
  return {};
}

std::span<const Protocol> PlainProtocol() {
  static constexpr std::array kPlain = {Protocol{.name = "plain", .piece = {}}};
  return kPlain;
}

}  // namespace tessera
