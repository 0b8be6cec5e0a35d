#pragma once
// Quick measurements of a host that no file of the system tells: its memory and
// its storage. Each takes about a second.

#include <string>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "profiler/host_cache.h"

namespace tessera {

// What each of `threads` threads on `cpus` processors copies to measure the
// memory: twice what it can have of the caches, and as much again is written,
// so that a run finds nothing there of the one before.
Bytes CopiedByEach(int threads, int cpus, const HostCache& cache);

// Bytes that `threads` threads together copy in a second, each between buffers
// of its own beyond the caches: a copied byte is one read and one written. The
// median of five runs.
BytesPerSecond MeasureCopies(int threads);

struct StorageSpeed {
  Bytes free;
  BytesPerSecond read;
  BytesPerSecond write;
  bool direct = false;  // past the page cache
  bool shared = false;  // by hosts: over a network (IsOnNetwork)
};

// Of the file system that holds `directory`, by a nameless file of 256 MiB
// (less where less is free) and direct I/O where it takes that
// (runtime/storage/file_tier.h), whose errors it returns; kInvalidInput where
// nothing is free. Elsewhere writes end when all is on the storage, and reads
// begin with nothing of it in the page cache, if the file system has another
// place (tmpfs has none).
Result<StorageSpeed> MeasureStorage(const std::string& directory);

}  // namespace tessera
