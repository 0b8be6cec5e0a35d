#pragma once
// UTF-8 (RFC 3629).

#include <cstddef>
#include <string_view>

namespace tessera {

// Bytes of the character at the start of `text`, or 0 where there is none: no
// overlong forms, no surrogates, at most U+10FFFF.
size_t Utf8Length(std::string_view text);

}  // namespace tessera
