#include "costmodel/profile/profile_io.h"

#include <algorithm>

#include "planner/io/proto_file_io.h"
#include "proto/profile.pb.h"

namespace tessera {
namespace {

Result<ProfileDb> FromProto(const proto::Profile& in) {
  ProfileDb out;
  if (in.ranks_at_once() < 0) {
    return InvalidInput("is " + std::to_string(in.ranks_at_once()) +
                            ": expected a number from 1",
                        "ranks_at_once");
  }
  if (in.threads() < 0) {
    return InvalidInput(
        "is " + std::to_string(in.threads()) + ": expected a number from 0",
        "threads");
  }
  out.origin = {in.host(), in.date(), in.libraries(),
                std::max(1, in.ranks_at_once()), in.threads()};
  for (int i = 0; i < in.rows_size(); ++i) {
    const proto::ProfileRow& row = in.rows(i);
    const std::string where = "rows[" + std::to_string(i) + "]";
    ProfileKey key;
    key.name = row.name();
    auto dtype = ParseDType(row.dtype());
    if (!dtype) return dtype.error().At(where + ".dtype");
    key.dtype = *dtype;
    key.device = row.device();
    key.ranks = row.ranks();
    key.nodes = row.nodes();
    key.rule = row.rule();
    key.extents.assign(row.extents().begin(), row.extents().end());
    key.payload = {row.payload_bytes()};
    const bool inserted =
        out.rows
            .emplace(std::move(key), Measurement{row.median_seconds(),
                                                 row.spread(), row.samples()})
            .second;
    if (!inserted) {
      return InvalidInput("the same was measured in an earlier row", where);
    }
  }
  return out;
}

}  // namespace

Result<ProfileDb> ReadProfile(const std::string& path) {
  proto::Profile message;
  TESSERA_RETURN_IF_ERROR(ReadProtoFile(path, message));
  auto profile = FromProto(message);
  if (!profile) return profile.error().At(path);
  const std::vector<Error> errors = Validate(*profile);
  if (!errors.empty()) return errors.front().At(path);
  return profile;
}

Result<void> WriteProfile(const std::string& path, const ProfileDb& profile) {
  const std::vector<Error> errors = Validate(profile);
  TESSERA_CHECK(errors.empty()) << errors.front().ToString();
  proto::Profile out;
  out.set_schema_version(kSchemaVersion);
  out.set_host(profile.origin.host);
  out.set_date(profile.origin.date);
  out.set_libraries(profile.origin.libraries);
  out.set_ranks_at_once(profile.origin.ranks_at_once);
  out.set_threads(profile.origin.threads);
  for (const auto& [key, measured] : profile.rows) {
    proto::ProfileRow& row = *out.add_rows();
    row.set_name(key.name);
    row.set_dtype(std::string(NameOf(key.dtype)));
    row.set_device(key.device);
    row.set_ranks(key.ranks);
    row.set_nodes(key.nodes);
    row.set_rule(key.rule);
    for (int64_t extent : key.extents) row.add_extents(extent);
    row.set_payload_bytes(key.payload.value);
    row.set_median_seconds(measured.median_s);
    row.set_spread(measured.spread);
    row.set_samples(measured.samples);
  }
  return WriteProtoFile(path, out);
}

}  // namespace tessera
