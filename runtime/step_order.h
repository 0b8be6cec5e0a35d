#pragma once
// How one rank enqueues a step on a device that works behind the host's back:
// which stream waits for which job, and where every buffer lies. Plain
// functions of plain data, so that they are tested without such a device.
//
// Jobs are enqueued in index order, each into its stream, and start when what
// is before them in the stream has ended and all that they wait for. A buffer
// has its place for the whole run: nothing is allocated within a step.

#include <cstdint>
#include <vector>

#include "planner/base/units.h"

namespace tessera {

struct EnqueuedJob {
  int stream = 0;         // from 0
  std::vector<int> deps;  // jobs of smaller index that end before it starts
};

// By job the jobs of other streams that its stream waits for before it: of its
// dependencies those that do not follow from the order within streams and from
// other waits. Memory grows with jobs times streams.
std::vector<std::vector<int>> WaitsOf(const std::vector<EnqueuedJob>& jobs);

// A buffer that several jobs use, in index order; the first writes it.
struct BufferUse {
  Bytes bytes;
  std::vector<int> jobs;  // ascending, at least one
};

struct BufferPlaces {
  std::vector<int64_t> offsets;  // by buffer; multiples of the alignment
  Bytes arena;                   // what all need together
};

// Places buffers of a step in one arena, best fit in index order: a buffer
// takes the room of others whose last job came before its first. Where the
// streams do not order these jobs, the first gets the others as dependencies,
// by adding to `jobs`. Buffers that one stream alone uses share room only with
// each other, so that a stream seldom waits for another's memory. A step that
// follows on such a step starts when that has ended.
BufferPlaces PlaceBuffers(const std::vector<BufferUse>& buffers,
                          int64_t alignment, std::vector<EnqueuedJob>& jobs);

}  // namespace tessera
