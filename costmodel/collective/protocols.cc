#include "costmodel/collective/protocols.h"

#include <array>

#include "costmodel/collective/fitted_protocols.h"

namespace tessera {

std::span<const Protocol> ProtocolsOf(SendPattern pattern, bool shared_memory) {
  static constexpr std::array kCopy = {Protocol{.name = "copy", .piece = {}}};
  if (shared_memory) return kCopy;
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

double OwnCopyCost() {
  return kOwnCopyCost;
}

}  // namespace tessera
