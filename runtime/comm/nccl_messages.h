#pragma once
// Messages between GPUs that any other may overtake (nccl_world.h): for each
// pair of ranks and direction a communicator and a stream, in which each
// message's header goes ahead of its data.

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "planner/base/result.h"
#include "runtime/comm/nccl_job.h"
#include "runtime/device/cuda_device.h"

namespace tessera {

// What goes ahead of a message.
struct MessageHeader {
  uint64_t group = 0;
  uint64_t tag = 0;
  int64_t bytes = 0;
};

class NcclMessages {
 public:
  explicit NcclMessages(NcclJob& job) : job_(job), device_(job.device()) {}
  // REQUIRES: the job's communicators are closed.
  ~NcclMessages();

  // Copies the message, in the queue's order, and lets it go as far as it can.
  Result<void> Post(int to, const MessageHeader& header, const void* data);
  // Issues what the channels take and forgets what has gone. Does not wait.
  Result<void> Push();
  // Whether all have gone.
  bool gone() const;

  // Waits for the oldest message of this group and tag and receives it in the
  // queue's order. kInvalidInput where it has another size; it then stays.
  Result<void> Take(int from, const MessageHeader& wanted, void* data);

 private:
  // The two sides of a message's way, of the pair (from, to).
  struct Channel {
    ncclComm_t comm = nullptr;
    CudaStream stream = nullptr;
  };
  // A header's place on both sides of the bus, from a pool. Its device memory
  // is never used by the queue, so it needs no order against it.
  struct Slot {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
  };
  struct Outgoing {
    enum class Step { kQueued, kHeaderIssued, kIssued };
    Step step = Step::kQueued;
    int64_t bytes = 0;
    Slot header;
    void* data = nullptr;        // the copy; null where there are no bytes
    CudaEvent copied = nullptr;  // then
    CudaEvent done = nullptr;    // once issued
  };
  struct Outbox {
    Channel channel;
    std::deque<Outgoing> messages;
  };
  // A message that came, or is on its way, while another one was wanted.
  struct Message {
    MessageHeader header;
    void* data = nullptr;         // null where there are no bytes
    CudaEvent arrived = nullptr;  // null: no data
  };
  struct Inbox {
    Channel channel;
    std::deque<Message> messages;
  };

  Result<bool> Advance(Outbox& outbox, Outgoing& message);
  Result<Message> ReceiveNext(int from, Inbox& inbox,
                              const MessageHeader& wanted, void* data);
  Result<void> AddSlots();

  NcclJob& job_;
  CudaDevice& device_;
  std::map<int, Outbox> outboxes_;  // by receiver
  std::map<int, Inbox> inboxes_;    // by sender
  std::vector<Slot> free_slots_;
  std::vector<void*> pinned_;  // behind the slots
  std::vector<void*> slots_on_device_;
};

}  // namespace tessera
