#pragma once
// A text as JSON writes it.

#include <string>
#include <string_view>

namespace tessera {

// `text` in quotes, with the escapes of RFC 8259. Bytes that are not UTF-8
// become U+FFFD.
std::string JsonString(std::string_view text);

}  // namespace tessera
