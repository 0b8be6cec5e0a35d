#include "runtime/storage/file_tier.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "planner/base/check.h"
#include "planner/lower/file_layout.h"
#include "runtime/storage/io_ring.h"

namespace tessera {
namespace {

// A file without a name, or -1.
int OpenNameless(const FileTierOptions& options) {
  if (options.nameless) {
    const int fd = open(options.directory.c_str(),
                        O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return fd;
  }
  std::string path = options.directory + "/tessera-offload-XXXXXX";
  const int fd = mkostemp(path.data(), O_CLOEXEC);
  if (fd >= 0) unlink(path.c_str());
  return fd;
}

// Open(2) may create a file and then refuse O_DIRECT, which would leave its
// name behind; so the file is open before. False: the file system does not take
// it.
bool MakeDirect(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && fcntl(fd, F_SETFL, flags | O_DIRECT) == 0;
}

}  // namespace

Result<std::unique_ptr<FileTier>> FileTier::Open(const FileTierOptions& options,
                                                 Bytes length) {
  const int fd = OpenNameless(options);
  if (fd < 0) {
    return Error{ErrorCode::kUnavailable,
                 "cannot make a file for offloading: " +
                     std::string(std::strerror(errno)),
                 options.directory};
  }
  const bool direct = options.direct && MakeDirect(fd);
  std::unique_ptr<FileTier> tier(
      new FileTier(fd, direct, options.directory, length));
  TESSERA_RETURN_IF_ERROR(tier->Reserve());
  if (options.ring) {
    tier->read_ring_ = IoRing::Make(kDepth);
    tier->write_ring_ = IoRing::Make(kDepth);
    if (tier->read_ring_ == nullptr || tier->write_ring_ == nullptr) {
      tier->read_ring_.reset();
      tier->write_ring_.reset();
    }
  }
  return tier;
}

FileTier::FileTier(int fd, bool direct, std::string directory, Bytes length)
    : fd_(fd),
      direct_(direct),
      directory_(std::move(directory)),
      length_(length) {}

FileTier::~FileTier() {
  close(fd_);
}

Result<void> FileTier::Reserve() {
  if (length_ == Bytes{}) return {};
  const auto reserve = [&]() -> int {
    // Beyond the process's limit the kernel would send a signal.
    rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
        limit.rlim_cur != RLIM_INFINITY &&
        static_cast<uint64_t>(length_.value) > limit.rlim_cur) {
      return EFBIG;
    }
    int result = 0;
    do {
      result = fallocate(fd_, 0, 0, length_.value);
    } while (result != 0 && errno == EINTR);
    if (result == 0) return 0;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
    if (FreeBytesOf(directory_) < length_) return ENOSPC;
    return ftruncate(fd_, length_.value) == 0 ? 0 : errno;
  };
  const int code = reserve();
  if (code == 0) return {};
  return Error{ErrorCode::kUnavailable,
               "cannot reserve " + std::to_string(length_.value) +
                   " bytes for the offload file: " + std::strerror(code),
               directory_};
}

Bytes FreeBytesOf(const std::string& directory) {
  struct statvfs storage;
  if (statvfs(directory.c_str(), &storage) != 0) {
    return {std::numeric_limits<int64_t>::max()};
  }
  return {static_cast<int64_t>(storage.f_bavail * storage.f_frsize)};
}

bool IsOnNetwork(const std::string& directory) {
  struct statfs storage;
  return statfs(directory.c_str(), &storage) == 0 &&
         IsOfNetwork(storage.f_type);
}

// linux/magic.h; Lustre's lustre_user.h, IBM's gpfs.h and BeeGFS' client for
// the last three. On some systems the type is a signed number of 32 bits.
bool IsOfNetwork(int64_t file_system) {
  constexpr uint32_t kTypes[] = {0x00006969,   // NFS
                                 0xff534d42,   // CIFS
                                 0xfe534d42,   // SMB2
                                 0x00c36400,   // Ceph
                                 0x5346414f,   // AFS
                                 0x01021997,   // 9P
                                 0x0bd00bd0,   // Lustre
                                 0x47504653,   // GPFS
                                 0x19830326};  // BeeGFS
  return std::ranges::find(kTypes, static_cast<uint32_t>(file_system)) !=
         std::end(kTypes);
}

Error FileTier::Failed(bool write, const Transfer& transfer, int code) const {
  return Error{ErrorCode::kUnavailable,
               std::string("cannot ") + (write ? "write " : "read ") +
                   std::to_string(transfer.bytes) + " bytes at offset " +
                   std::to_string(transfer.offset) + " of the offload file: " +
                   (code == 0 ? "it ends there" : std::strerror(code)),
               directory_};
}

Result<void> FileTier::Read(std::span<const Transfer> transfers) {
  const std::lock_guard lock(read_mutex_);
  return Run(transfers, false);
}

Result<void> FileTier::Write(std::span<const Transfer> transfers) {
  const std::lock_guard lock(write_mutex_);
  return Run(transfers, true);
}

Result<void> FileTier::DropCached() {
  int code = fsync(fd_) == 0 ? 0 : errno;
  if (code == 0) code = posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
  if (code == 0) return {};
  return Error{ErrorCode::kUnavailable,
               std::string("cannot bring the offload file to the storage: ") +
                   std::strerror(code),
               directory_};
}

// Requests of whole blocks. One that ends early goes on where it has come to;
// if it is direct, behind its last whole block.
Result<void> FileTier::Run(std::span<const Transfer> transfers, bool write) {
  std::vector<Transfer> requests;
  for (const Transfer& transfer : transfers) {
    TESSERA_CHECK(
        reinterpret_cast<uintptr_t>(transfer.data) % kFileBlockBytes == 0)
        << "a buffer that is not aligned";
    const int64_t bytes = WholeFileBlocks({transfer.bytes}).value;
    TESSERA_CHECK(transfer.offset % kFileBlockBytes == 0 &&
                  transfer.offset + bytes <= length_.value)
        << bytes << " bytes at " << transfer.offset << " of a file of "
        << length_.value;
    for (int64_t at = 0; at < bytes; at += kRequestBytes) {
      requests.push_back({transfer.offset + at,
                          static_cast<std::byte*>(transfer.data) + at,
                          std::min(kRequestBytes, bytes - at)});
    }
  }
  // Whether a request that has moved `result` bytes (or failed) is done.
  const auto advance = [&](Transfer& request, int64_t result) -> Result<bool> {
    if (result == -EINTR || result == -EAGAIN) return false;
    if (result <= 0) return Failed(write, request, static_cast<int>(-result));
    if (direct_ && result < request.bytes) {
      if (result < kFileBlockBytes) return Failed(write, request, EIO);
      result -= result % kFileBlockBytes;
    }
    request.offset += result;
    request.data = static_cast<std::byte*>(request.data) + result;
    request.bytes -= result;
    return request.bytes == 0;
  };

  if (IoRing* const ring = (write ? write_ring_ : read_ring_).get()) {
    size_t next = 0;
    int in_flight = 0;
    Result<void> first;  // what is in flight ends in any case
    const auto submit = [&](size_t i) {
      ring->Submit(write, fd_, requests[i].data,
                   static_cast<uint32_t>(requests[i].bytes), requests[i].offset,
                   i);
      ++in_flight;
    };
    while (in_flight > 0 || (first && next < requests.size())) {
      while (first && in_flight < kDepth && next < requests.size()) {
        submit(next++);
      }
      const IoRing::Completion completion = ring->Wait();
      --in_flight;
      const auto done = advance(requests[completion.tag], completion.result);
      if (!done) {
        if (first) first = done.error();
      } else if (!*done && first) {
        submit(completion.tag);
      }
    }
    return first;
  }
  for (Transfer& request : requests) {
    for (;;) {
      const auto size = static_cast<size_t>(request.bytes);
      const int64_t moved =
          write ? pwrite(fd_, request.data, size, request.offset)
                : pread(fd_, request.data, size, request.offset);
      TESSERA_TRY(const bool done,
                  advance(request, moved < 0 ? -int64_t{errno} : moved));
      if (done) break;
    }
  }
  return {};
}

}  // namespace tessera
