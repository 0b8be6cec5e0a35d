#pragma once
// One reader and one writer for every file format of proto/. The ending
// chooses the encoding (proto_endings.h): .txtpb (text proto), .json (JSON with
// the field names of the .proto file) or .pb (binary). Included only by *_io.cc
// files, which turn messages into plain structs.
//
// Every format's message has an int32 field schema_version. Thread-safe:
// functions without state.

#include <google/protobuf/message.h>

#include <string>

#include "planner/base/result.h"

namespace tessera {

// The version that is written, and the only one that is read.
inline constexpr int kSchemaVersion = 1;

// Replaces the contents of `out` by the file's. Errors: kNotFound for a
// missing file; kInvalidInput for an unknown ending, a syntax error, a file
// that breaks off, an unknown or repeated field (with the nearest known name),
// a value of the wrong type, a missing or other schema_version. `where` is
// "path:line:column" in text and JSON, "path" in binary. A binary file cut
// exactly between two top-level fields is well-formed: what it lacks is for
// the format's own validation to find.
Result<void> ReadProtoFile(const std::string& path,
                           google::protobuf::Message& out);

// Writes `message`, whose schema_version must be kSchemaVersion, by
// WriteFileAtomically. The same message gives the same bytes.
Result<void> WriteProtoFile(const std::string& path,
                            const google::protobuf::Message& message);

// `message` as WriteProtoFile writes it to a .json file.
Result<std::string> JsonOf(const google::protobuf::Message& message);

}  // namespace tessera
