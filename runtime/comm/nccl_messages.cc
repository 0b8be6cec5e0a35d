#include "runtime/comm/nccl_messages.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "runtime/comm/nccl_calls.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/text.h"

namespace tessera {

using Clock = NcclJob::Clock;

NcclMessages::~NcclMessages() {
  for (auto& [to, outbox] : outboxes_) {
    if (outbox.channel.stream != nullptr) {
      (void)cudaStreamSynchronize(outbox.channel.stream);
    }
    for (Outgoing& message : outbox.messages) {
      if (message.data != nullptr) device_.Free(message.data);
    }
  }
  for (auto& [from, inbox] : inboxes_) {
    if (inbox.channel.stream != nullptr) {
      (void)cudaStreamSynchronize(inbox.channel.stream);
    }
    for (Message& message : inbox.messages) {
      if (message.data != nullptr) device_.Free(message.data);
    }
  }
  for (void* slots : slots_on_device_) device_.Free(slots);
  for (void* pinned : pinned_) (void)cudaFreeHost(pinned);
}

// ---- Sending ----------------------------------------------------------------

Result<void> NcclMessages::Post(int to, const MessageHeader& header,
                                const void* data) {
  TESSERA_RETURN_IF_ERROR(device_.Select());
  void* copy = nullptr;
  if (header.bytes > 0) {
    TESSERA_TRY(
        copy, device_.Allocate({header.bytes}, MemoryCategory::kCommunication));
    device_.Copy(copy, data, {.run_bytes = header.bytes});
  }
  if (to == job_.rank()) {
    Message message{header, copy, nullptr};
    TESSERA_TRY(message.arrived, device_.Record(device_.queue()));
    inboxes_[to].messages.push_back(message);
    return {};
  }
  Outbox& outbox = outboxes_[to];
  if (outbox.channel.comm == nullptr) {
    TESSERA_TRY(outbox.channel.stream,
                device_.MakeStream(StreamRole::kSendForward));
    TESSERA_TRY(outbox.channel.comm,
                job_.Connect(Text("channel/", job_.rank(), "/", to), 0, 2,
                             Text("rank ", to), /*wait=*/false));
  }
  if (free_slots_.empty()) TESSERA_RETURN_IF_ERROR(AddSlots());
  Outgoing message;
  message.bytes = header.bytes;
  message.data = copy;
  message.header = free_slots_.back();
  free_slots_.pop_back();
  std::memcpy(message.header.host, &header, sizeof(header));
  if (copy != nullptr) {
    TESSERA_TRY(message.copied, device_.Record(device_.queue()));
  }
  outbox.messages.push_back(message);
  return job_.WhileWaiting();
}

Result<void> NcclMessages::Push() {
  for (auto& [to, outbox] : outboxes_) {
    for (Outgoing& message : outbox.messages) {
      TESSERA_TRY(const bool issued, Advance(outbox, message));
      if (!issued) break;
    }
    while (!outbox.messages.empty()) {
      Outgoing& message = outbox.messages.front();
      if (message.step != Outgoing::Step::kIssued) break;
      TESSERA_TRY(const bool done, device_.IsDone(message.done));
      if (!done) break;
      device_.Recycle(message.done);
      free_slots_.push_back(message.header);
      if (message.data != nullptr) {
        device_.Recycle(message.copied);
        device_.Free(message.data);
      }
      outbox.messages.pop_front();
    }
  }
  return {};
}

// Whether the message is issued. The header does not wait for the copy, so that
// the receiver can enqueue its half before the data is there.
Result<bool> NcclMessages::Advance(Outbox& outbox, Outgoing& message) {
  using Step = Outgoing::Step;
  if (message.step == Step::kIssued) return true;
  const ncclComm_t comm = outbox.channel.comm;
  const CudaStream stream = outbox.channel.stream;
  const auto send = [&](const void* data, int64_t bytes) {
    return NcclOk(ncclSend(data, static_cast<size_t>(bytes), ncclUint8,
                           /*peer=*/1, comm, stream),
                  comm, "ncclSend");
  };
  TESSERA_TRY(const bool connecting, IsBusy(comm, "send"));
  if (connecting) return false;
  if (message.step == Step::kQueued) {
    TESSERA_RETURN_IF_ERROR(device_.Select());
    TESSERA_RETURN_IF_ERROR(CudaOk(
        cudaMemcpyAsync(message.header.device, message.header.host,
                        sizeof(MessageHeader), cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync"));
    TESSERA_RETURN_IF_ERROR(send(message.header.device, sizeof(MessageHeader)));
    message.step = Step::kHeaderIssued;
    TESSERA_TRY(const bool sending_header, IsBusy(comm, "send"));
    if (sending_header) return false;
  }
  // The data; `done` stands for: it was given to NCCL, and NCCL may be busy.
  if (message.done == nullptr && message.data != nullptr) {
    TESSERA_RETURN_IF_ERROR(device_.RunAfter(stream, message.copied));
    TESSERA_RETURN_IF_ERROR(send(message.data, message.bytes));
    TESSERA_TRY(message.done, device_.Record(stream));
    TESSERA_TRY(const bool sending, IsBusy(comm, "send"));
    if (sending) return false;
  }
  if (message.done != nullptr) device_.Recycle(message.done);
  TESSERA_TRY(message.done, device_.Record(stream));
  message.step = Step::kIssued;
  return true;
}

bool NcclMessages::gone() const {
  return std::ranges::all_of(
      outboxes_, [](const auto& box) { return box.second.messages.empty(); });
}

// ---- Receiving --------------------------------------------------------------

Result<void> NcclMessages::Take(int from, const MessageHeader& wanted,
                                void* data) {
  TESSERA_RETURN_IF_ERROR(device_.Select());
  Inbox& inbox = inboxes_[from];
  auto& messages = inbox.messages;
  const auto matches = [&](const Message& message) {
    return message.header.group == wanted.group &&
           message.header.tag == wanted.tag;
  };
  auto found = std::find_if(messages.begin(), messages.end(), matches);
  const Clock::time_point begin = Clock::now();
  while (found == messages.end()) {
    if (from == job_.rank()) {
      TESSERA_RETURN_IF_ERROR(job_.Wait([] { return Result<bool>(false); },
                                        begin, Text("a message of its own")));
    }
    TESSERA_TRY(const Message next, ReceiveNext(from, inbox, wanted, data));
    if (matches(next) && next.header.bytes == wanted.bytes) return {};
    messages.push_back(next);
    found = std::find_if(messages.begin(), messages.end(), matches);
  }
  if (found->header.bytes != wanted.bytes) {
    return MessageSizesDiffer(from, found->header.bytes, wanted.tag,
                              wanted.bytes);
  }
  if (found->arrived != nullptr) {
    TESSERA_RETURN_IF_ERROR(device_.RunAfter(device_.queue(), found->arrived));
    device_.Recycle(found->arrived);
  }
  if (found->data != nullptr) {
    device_.Copy(data, found->data, {.run_bytes = wanted.bytes});
    TESSERA_RETURN_IF_ERROR(job_.FreeAfterQueue(found->data));
  }
  messages.erase(found);
  return {};
}

// The next message from `from`: if it is the one that is wanted, into `data`
// and in the queue's order, else into memory of its own.
Result<NcclMessages::Message> NcclMessages::ReceiveNext(
    int from, Inbox& inbox, const MessageHeader& wanted, void* data) {
  const Clock::time_point begin = Clock::now();
  const std::string who = Text("rank ", from);
  if (inbox.channel.comm == nullptr) {
    TESSERA_TRY(inbox.channel.stream,
                device_.MakeStream(StreamRole::kRecvForward));
    TESSERA_TRY(
        inbox.channel.comm,
        job_.Connect(Text("channel/", from, "/", job_.rank()), 1, 2, who,
                     /*wait=*/true));
  }
  const ncclComm_t comm = inbox.channel.comm;
  const CudaStream stream = inbox.channel.stream;
  const auto receive = [&](void* to, int64_t bytes) -> Result<void> {
    TESSERA_RETURN_IF_ERROR(
        NcclOk(ncclRecv(to, static_cast<size_t>(bytes), ncclUint8, /*peer=*/0,
                        comm, stream),
               comm, "ncclRecv"));
    return job_.Settle(comm, who);
  };

  if (free_slots_.empty()) TESSERA_RETURN_IF_ERROR(AddSlots());
  const Slot slot = free_slots_.back();
  free_slots_.pop_back();
  TESSERA_RETURN_IF_ERROR(receive(slot.device, sizeof(MessageHeader)));
  TESSERA_RETURN_IF_ERROR(
      CudaOk(cudaMemcpyAsync(slot.host, slot.device, sizeof(MessageHeader),
                             cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync"));
  TESSERA_TRY(const CudaEvent header_came, device_.Record(stream));
  TESSERA_RETURN_IF_ERROR(
      job_.Wait([&] { return device_.IsDone(header_came); }, begin, who));
  device_.Recycle(header_came);
  Message message;
  std::memcpy(&message.header, slot.host, sizeof(MessageHeader));
  free_slots_.push_back(slot);

  const int64_t bytes = message.header.bytes;
  if (bytes == 0) return message;
  const bool is_wanted = message.header.group == wanted.group &&
                         message.header.tag == wanted.tag &&
                         bytes == wanted.bytes;
  if (!is_wanted) {
    TESSERA_TRY(message.data,
                device_.Allocate({bytes}, MemoryCategory::kCommunication));
  }
  // What the queue did with this memory comes first.
  TESSERA_RETURN_IF_ERROR(device_.Order(device_.queue(), stream));
  TESSERA_RETURN_IF_ERROR(receive(is_wanted ? data : message.data, bytes));
  if (is_wanted) {
    TESSERA_RETURN_IF_ERROR(device_.Order(stream, device_.queue()));
  } else {
    TESSERA_TRY(message.arrived, device_.Record(stream));
  }
  return message;
}

// ---- Headers ----------------------------------------------------------------

Result<void> NcclMessages::AddSlots() {
  constexpr int kSlots = 256;
  constexpr int kSlotBytes = 64;  // a header and its alignment
  static_assert(sizeof(MessageHeader) <= kSlotBytes);
  void* host = nullptr;
  TESSERA_RETURN_IF_ERROR(
      CudaOk(cudaMallocHost(&host, kSlots * kSlotBytes), "cudaMallocHost"));
  pinned_.push_back(host);
  TESSERA_TRY(
      void* const on_device,
      device_.Allocate({kSlots * kSlotBytes}, MemoryCategory::kCommunication));
  slots_on_device_.push_back(on_device);
  // What the queue still does with this memory is over then.
  TESSERA_RETURN_IF_ERROR(device_.Synchronize());
  for (int slot = 0; slot < kSlots; ++slot) {
    free_slots_.push_back(
        {static_cast<std::byte*>(host) + slot * kSlotBytes,
         static_cast<std::byte*>(on_device) + slot * kSlotBytes});
  }
  return {};
}

}  // namespace tessera
