#pragma once
// The endings of the files of proto/, which choose their encoding. Functions
// without state; thread-safe.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

enum class ProtoEncoding : uint8_t { kText, kJson, kBinary };

// By the ending of `path`; nothing where it is none of these.
std::optional<ProtoEncoding> ProtoEncodingOf(std::string_view path);

// Whether `path` ends as a file that can be read and written.
bool HasProtoFileEnding(std::string_view path);

// ".txtpb, .textproto, .pbtxt, .json or .pb", for errors.
std::string ProtoEndings();

}  // namespace tessera
