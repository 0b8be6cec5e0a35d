#pragma once
// What goes over the wire between the store's server and its clients. Integers
// are in the byte order of the host (ranks of one job run one binary):
//   greeting  magic u64, version u32, length u32, rank i32, size i32, job id
//   welcome   magic u64, version u32, status u8; and of a job that has ended
//             length u32, text
//   request   operation u8, key length u32, value length u32, argument i64,
//             key, value
//   reply     status u8, length u32, value (of a job that has ended why)
// `argument` is the delta of an add and the timeout of a get in milliseconds.
// A rank that closes its store sets LeftKey before: of one that has not, and
// whose connection ends, the server tells by kGoneKey (runtime/comm/store.h).

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace tessera::wire {

inline constexpr uint64_t kMagic = 0x0041524553534554;  // "TESSERA\0"
inline constexpr uint32_t kVersion = 2;
inline constexpr uint32_t kMaxKey = 256;
inline constexpr uint32_t kMaxValue = 1 << 20;
inline constexpr size_t kVersionEnd =
    12;  // of a greeting; the same in all versions
inline constexpr size_t kGreetingBytes = 24;
inline constexpr size_t kWelcomeBytes = 13;
inline constexpr size_t kRequestBytes = 17;
inline constexpr size_t kReplyBytes = 5;

enum Operation : uint8_t { kSet = 1, kGet = 2, kAdd = 3 };
enum Status : uint8_t {
  kOk = 0,
  kTimeout = 1,
  kOtherJob = 2,
  kCameBefore = 3,
  kDisagreement = 4,   // ends the job with kInvalidInput
  kNoDescriptors = 5,  // with kUnavailable
};

inline std::string LeftKey(int rank) {
  return "left/" + std::to_string(rank);
}

template <typename T>
void Append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
T Read(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

}  // namespace tessera::wire
