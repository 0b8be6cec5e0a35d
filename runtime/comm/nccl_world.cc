#include "runtime/comm/nccl_world.h"

#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/fnv1a.h"
#include "runtime/comm/arguments.h"
#include "runtime/comm/nccl_communicator.h"
#include "runtime/comm/nccl_job.h"
#include "runtime/comm/nccl_messages.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

// The first in which each group of calls has a job of its own: before, a thread
// may have no operation of one communicator under way while it begins one of
// another, as messages, and communicators that close, do. (Those of a group are
// aborted together from 2.22 on.) What is loaded may be older than the header.
constexpr int kLeastVersion = NCCL_VERSION(2, 27, 0);
static_assert(NCCL_VERSION_CODE >= kLeastVersion,
              "NCCL 2.27 or later is needed");

class NcclWorld : public CommWorld {
 public:
  NcclWorld(int rank, int size, Store& store, CudaDevice& device,
            CommOptions options)
      : job_(rank, size, store, device, std::move(options)), messages_(job_) {}
  ~NcclWorld() override;

  // The collective start of all ranks.
  Result<void> Open();

  int world_rank() const override { return job_.rank(); }
  int world_size() const override { return job_.size(); }
  Result<Communicator*> Group(std::span<const int> ranks) override;
  Result<void> Flush() override { return job_.Flush(); }
  void Abort(std::string_view reason) override {
    job_.Fail(RankAborted(job_.rank(), reason));
  }
  void SetCurrentTask(std::string_view task) override { job_.set_task(task); }

 private:
  NcclJob job_;
  NcclMessages messages_;
  NcclChannels channels_;
  std::map<std::vector<int>, std::unique_ptr<NcclCommunicator>> groups_;
};

Result<void> NcclWorld::Open() {
  TESSERA_RETURN_IF_ERROR(job_.Open([this] { return messages_.Push(); }));
  // NCCL's calls block, whatever their communicators say, where a variable or a
  // line of a file of NCCL's (/etc/nccl.conf) has it so, and none of the waits
  // for them ever look at anything else. A file does not replace what is set
  // before NCCL's first call.
  setenv("NCCL_COMM_BLOCKING", "0", /*overwrite=*/1);
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess || version < kLeastVersion) {
    return job_.Fail(Unavailable(
        Text("NCCL ", NcclVersion(), " is loaded: expected 2.27 or later")));
  }
  TESSERA_RETURN_IF_ERROR(job_.Meet());
  std::vector<int> everyone(static_cast<size_t>(job_.size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  if (auto all = Group(everyone); !all) return all.error();
  job_.EndStart();
  return {};
}

Result<Communicator*> NcclWorld::Group(std::span<const int> ranks) {
  std::vector<int> list(ranks.begin(), ranks.end());
  if (const auto found = groups_.find(list); found != groups_.end()) {
    return found->second.get();
  }
  TESSERA_RETURN_IF_ERROR(CheckGroup(list, job_.rank(), job_.size()));
  TESSERA_RETURN_IF_ERROR(job_.CheckUsable());
  const auto here =
      std::find(list.begin(), list.end(), job_.rank()) - list.begin();
  const auto position = static_cast<int>(here);
  // The list itself may be longer than a key.
  const std::string key =
      Text("group/", list.size(), "/", Fnv1a().AddAll(list).value());
  auto comm = job_.Connect(key, position, static_cast<int>(list.size()),
                           "the other members", /*wait=*/true);
  if (!comm) {
    return job_.AtThisRank(job_.Fail(comm.error()),
                           Text("joining group ", GroupText(list)));
  }
  auto group = std::make_unique<NcclCommunicator>(job_, messages_, channels_,
                                                  list, position, *comm);
  Communicator* const result = group.get();
  groups_.emplace(std::move(list), std::move(group));
  return result;
}

// Sends what is left, of a job that is well.
NcclWorld::~NcclWorld() {
  (void)job_.device().Select();
  if (!job_.failed()) (void)job_.Flush();
  if (!job_.failed()) {
    (void)job_.Wait(
        [&]() -> Result<bool> {
          TESSERA_RETURN_IF_ERROR(messages_.Push());
          return messages_.gone();
        },
        NcclJob::Clock::now(), "receivers of its messages");
  }
  job_.Close();
}

}  // namespace

Result<std::unique_ptr<CommWorld>> MakeNcclWorld(int rank, int size,
                                                 Store& store,
                                                 CudaDevice& device,
                                                 CommOptions options) {
  auto world = std::make_unique<NcclWorld>(rank, size, store, device,
                                           std::move(options));
  TESSERA_RETURN_IF_ERROR(world->Open());
  return std::unique_ptr<CommWorld>(std::move(world));
}

std::string NcclVersion() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "unknown";
  // NCCL_VERSION of nccl.h, from 2.9 on.
  return Text(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace tessera
