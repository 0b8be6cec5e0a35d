#pragma once
// Whole files, read at once and written so that no reader ever sees half of
// one. Thread-safe: functions without state.

#include <string>
#include <string_view>

#include "planner/base/result.h"

namespace tessera {

// The bytes of the file at `path`. kNotFound when there is none,
// kUnavailable when it cannot be read; `where` is the path.
Result<std::string> ReadFile(const std::string& path);

// Whether it can be read again: not a pipe or a device.
bool IsRegularFile(const std::string& path);

// Takes the byte order mark that editors put in front of UTF-8 away.
void DropByteOrderMark(std::string& text);

// Makes `bytes` the contents of the file at `path`: writes a new file beside
// it, flushes that to the disk and renames it over `path`. When any step fails
// (full disk, no permission) the new file is removed, `path` is as it was, and
// the error is kNotFound for a missing directory, else kUnavailable. Symbolic
// links are followed; what is not a regular file (a terminal, a pipe) cannot
// be replaced and is written in place.
Result<void> WriteFileAtomically(const std::string& path,
                                 std::string_view bytes);

}  // namespace tessera
