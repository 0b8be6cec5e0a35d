#include "tests/emulation/cuda_emulation.h"

#include <cuda_runtime_api.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string_view>
#include <vector>

#include "planner/base/check.h"
#include "planner/base/rng.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace tessera::emulation {
namespace {

constexpr unsigned kMostThreads = 1024;    // of a block
constexpr size_t kMostShared = 227 << 10;  // of sm_90
constexpr size_t kAlignment = 128;         // of dynamic shared memory
constexpr int kPoison = 0xff;

// ---- Fibers: execution contexts of one thread, each with a stack ------------

// Begun by ucontext and switched by setjmp, since swapcontext calls into the
// kernel each time.
struct Fiber {
  jmp_buf where = {};
  ucontext_t start = {};
  bool started = true;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
};

#ifdef __SANITIZE_ADDRESS__
// AddressSanitizer is told which stack runs.
Fiber* left = nullptr;
void Leave(Fiber& from, const Fiber& to) {
  left = &from;
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
}
void Arrive(const Fiber& here) {
  __sanitizer_finish_switch_fiber(here.fake_stack, &left->stack,
                                  &left->stack_bytes);
}
void Forget(const Fiber& fiber) {
  __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);
}
#else
void Leave(Fiber&, const Fiber&) {}
void Arrive(const Fiber&) {}
void Forget(const Fiber&) {}
#endif

void Switch(Fiber& from, Fiber& to) {
  if (_setjmp(from.where) == 0) {
    Leave(from, to);
    if (to.started) _longjmp(to.where, 1);
    to.started = true;
    setcontext(&to.start);
  }
  Arrive(from);
}

// Above a page that stops an overflow.
void MakeStack(Fiber& fiber) {
  constexpr size_t kStackBytes = 256 << 10;
  constexpr size_t kGuardBytes = 4096;
  void* const memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TESSERA_CHECK(memory != MAP_FAILED) << "no memory for stacks";
  TESSERA_CHECK(mprotect(memory, kGuardBytes, PROT_NONE) == 0);
  fiber.stack = static_cast<std::byte*>(memory) + kGuardBytes;
  fiber.stack_bytes = kStackBytes - kGuardBytes;
}

void Begin(Fiber& fiber, void (*entry)()) {
  Forget(fiber);
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = const_cast<void*>(fiber.stack);
  fiber.start.uc_stack.ss_size = fiber.stack_bytes;
  makecontext(&fiber.start, entry, 0);
  fiber.started = false;
}

// ---- The device -------------------------------------------------------------

struct PendingCopy {
  void* to;
  const void* from;
  size_t bytes;
  size_t valid_bytes;
  int group;
};

struct Thread {
  Fiber fiber;
  uint3 index = {};
  bool ended = false;
  std::vector<PendingCopy> copies;
  int group = 0;  // that the next copy belongs to
};

// Some threads that wait for others at a barrier or collective.
struct Meeting {
  unsigned warp = 0;
  unsigned mask = 0;      // 0: the whole block
  unsigned expected = 0;  // threads
  std::string_view name;
  Site site;
  std::vector<unsigned> waiting;  // numbers of threads
  std::vector<void*> lanes;
};

std::string Text(std::string_view name, const Site& site) {
  std::string_view file = site.file_name();
  file.remove_prefix(file.rfind('/') + 1);
  return std::string(name) + " in " + std::string(file) + ":" +
         std::to_string(site.line());
}

std::string Text(unsigned x, unsigned y, unsigned z) {
  return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " +
         std::to_string(z) + ")";
}

// Runs one block at a time; its state is that block's.
class Machine {
 public:
  std::mutex mutex;
  Rng order{1};
  bool runs_blocks = true;

  void Run(const std::function<void()>& thread, dim3 grid, dim3 block,
           size_t shared_bytes, std::string* error) {
    body_ = &thread;
    gridDim = grid;
    blockDim = block;
    threads_in_block_ = block.x * block.y * block.z;
    error_.clear();
    if (threads_in_block_ == 0 || threads_in_block_ > kMostThreads ||
        block.z > 64 || grid.x > 0x7fffffff || grid.y > 65535 ||
        grid.z > 65535) {
      error_ = "no device launches a grid of " + Text(grid.x, grid.y, grid.z) +
               " blocks of " + Text(block.x, block.y, block.z) + " threads";
    } else if (shared_bytes > kMostShared) {
      error_ = "no device has " + std::to_string(shared_bytes) +
               " bytes of shared memory";
    }
    while (threads_.size() < threads_in_block_ && error_.empty()) {
      MakeStack(threads_.emplace_back().fiber);
      Begin(threads_.back().fiber, Entry);
    }
    if (error->empty()) *error = error_;
    if (!runs_blocks) return;
    std::vector<unsigned> blocks(size_t{grid.x} * grid.y * grid.z);
    std::iota(blocks.begin(), blocks.end(), 0);
    for (size_t left = blocks.size(); left > 0 && error_.empty(); --left) {
      const uint32_t drawn = order.Below(static_cast<uint32_t>(left));
      std::swap(blocks[left - 1], blocks[drawn]);
      const unsigned i = blocks[left - 1];
      blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
      RunBlock(shared_bytes);
    }
    if (error->empty()) *error = error_;
  }

  void* SharedVariable(const void* tag, size_t bytes) {
    std::unique_ptr<std::byte[]>& variable = shared_[tag];
    if (variable == nullptr) {
      variable = std::make_unique_for_overwrite<std::byte[]>(bytes);
      std::memset(variable.get(), kPoison, bytes);
    }
    return variable.get();
  }
  std::byte* dynamic_shared() { return static_cast<std::byte*>(dynamic_); }
  Thread& running() { return threads_[running_]; }

  // `mask` 0 stands for the whole block.
  void Meet(unsigned mask, void* mine, const All& all, std::string_view name,
            const Site& site) {
    Join(mask, mine, all, name, site);
    SwitchToNext();
  }

 private:
  void RunBlock(size_t shared_bytes) {
    TESSERA_CHECK(posix_memalign(&dynamic_, kAlignment, shared_bytes) == 0);
    std::memset(dynamic_, kPoison, shared_bytes);
    shared_.clear();
    open_meetings_ = 0;
    eager_ = order.Below(2) == 0;
    ready_.resize(threads_in_block_);
    std::iota(ready_.begin(), ready_.end(), 0);
    for (unsigned i = 0; i < threads_in_block_; ++i) {
      threads_[i].ended = false;
      threads_[i].copies.clear();
      threads_[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y,
                           i / blockDim.x / blockDim.y};
    }
    Switch(launcher_, Next());
    std::free(dynamic_);
    if (error_.empty()) return;
    for (Thread& thread : threads_) Begin(thread.fiber, Entry);
  }

  // What a fiber does: one thread after the other.
  static void Entry();

  // Draws a thread that may run; the launcher where there is none.
  Fiber& Next() {
    if (ready_.empty() && open_meetings_ > 0 && error_.empty()) {
      Fail(DescribeStuck());
    }
    if (ready_.empty() || !error_.empty()) return launcher_;
    if (!eager_ || order.Below(16) == 0) {
      std::swap(ready_.back(),
                ready_[order.Below(static_cast<uint32_t>(ready_.size()))]);
    }
    running_ = ready_.back();
    ready_.pop_back();
    threadIdx = running().index;
    return running().fiber;
  }

  void SwitchToNext() {
    Fiber& from = running().fiber;
    Fiber& to = Next();
    if (&from != &to) Switch(from, to);
  }

  // The running thread waits, or all it waits for are ready.
  void Join(unsigned mask, void* mine, const All& all, std::string_view name,
            const Site& site) {
    const unsigned warp = running_ / warpSize;
    const unsigned slot = mask == 0 ? running_ : running_ % warpSize;
    if (mask != 0) {
      if ((mask >> slot & 1) == 0) {
        return Fail(IndexOfRunning() + " is not in its own mask at " +
                    Text(name, site));
      }
      // A block's last warp may have fewer threads.
      const unsigned in_warp = threads_in_block_ - warp * warpSize;
      if (in_warp < warpSize) mask &= (1u << in_warp) - 1;
    }
    Meeting& meeting = FindMeeting(warp, mask, name, site);
    if (meeting.name != name || meeting.site.line() != site.line()) {
      return Fail(IndexOfRunning() + " is at " + Text(name, site) +
                  " while others wait at " + Text(meeting.name, meeting.site));
    }
    meeting.lanes[slot] = mine;
    meeting.waiting.push_back(running_);
    if (meeting.waiting.size() < meeting.expected) return;
    all(meeting.lanes.data());
    ready_.insert(ready_.end(), meeting.waiting.begin(), meeting.waiting.end());
    std::swap(meeting, meetings_[--open_meetings_]);
  }

  Meeting& FindMeeting(unsigned warp, unsigned mask, std::string_view name,
                       const Site& site) {
    for (size_t i = 0; i < open_meetings_; ++i) {
      Meeting& meeting = meetings_[i];
      if (meeting.mask == mask && (mask == 0 || meeting.warp == warp)) {
        return meeting;
      }
    }
    if (open_meetings_ == meetings_.size()) meetings_.emplace_back();
    Meeting& meeting = meetings_[open_meetings_++];
    meeting.waiting.clear();
    meeting.warp = warp;
    meeting.mask = mask;
    meeting.expected = mask == 0 ? threads_in_block_
                                 : static_cast<unsigned>(std::popcount(mask));
    meeting.name = name;
    meeting.site = site;
    meeting.lanes.assign(mask == 0 ? threads_in_block_ : warpSize, nullptr);
    return meeting;
  }

  // The block is abandoned.
  void Fail(const std::string& what) {
    error_ = "block " + Text(blockIdx.x, blockIdx.y, blockIdx.z) + ": " + what;
  }

  std::string IndexOfRunning() {
    const uint3 index = running().index;
    return "thread " + Text(index.x, index.y, index.z);
  }

  std::string DescribeStuck() {
    std::map<std::string, size_t> waiting;
    for (size_t i = 0; i < open_meetings_; ++i) {
      const Meeting& meeting = meetings_[i];
      waiting[Text(meeting.name, meeting.site)] += meeting.waiting.size();
    }
    std::string text = "stuck: ";
    for (const auto& [where, count] : waiting) {
      text += std::to_string(count) + " threads wait at " + where + ", ";
    }
    const auto ended =
        std::count_if(threads_.begin(), threads_.begin() + threads_in_block_,
                      [](const Thread& thread) { return thread.ended; });
    return text + std::to_string(ended) + " have ended";
  }

  const std::function<void()>* body_ = nullptr;
  unsigned threads_in_block_ = 0;
  std::string error_;
  Fiber launcher_;
  std::deque<Thread> threads_;  // as many as the largest block had
  unsigned running_ = 0;
  std::vector<unsigned> ready_;
  // Whether those that became ready last mostly run first, so that one warp
  // runs far ahead of others.
  bool eager_ = false;
  std::vector<Meeting> meetings_;  // the first ones are open
  size_t open_meetings_ = 0;
  std::map<const void*, std::unique_ptr<std::byte[]>> shared_;
  void* dynamic_ = nullptr;
};

Machine& TheMachine() {
  static Machine* const machine = new Machine();
  return *machine;
}

void Machine::Entry() {
  Machine& machine = TheMachine();
  Arrive(machine.running().fiber);
  for (;;) {
    (*machine.body_)();
    machine.running().ended = true;
    machine.SwitchToNext();
  }
}

}  // namespace

void Run(const std::function<void()>& thread, dim3 grid, dim3 block,
         size_t shared_bytes, std::string* error) {
  Machine& machine = TheMachine();
  const std::scoped_lock lock(machine.mutex);
  machine.Run(thread, grid, block, shared_bytes, error);
}

void SetRunsBlocks(bool yes) {
  TheMachine().runs_blocks = yes;
}

void SetSeed(uint64_t seed) {
  TheMachine().order = Rng(seed);
}

void* SharedVariable(const void* tag, size_t bytes) {
  return TheMachine().SharedVariable(tag, bytes);
}

std::byte* DynamicShared() {
  return TheMachine().dynamic_shared();
}

void WarpMeets(unsigned mask, void* mine, const All& all, const char* name,
               Site site) {
  TheMachine().Meet(mask, mine, all, name, site);
}

void BlockMeets(void* mine, const All& all, const char* name, Site site) {
  TheMachine().Meet(0, mine, all, name, site);
}

void CopyLater(void* to, const void* from, size_t bytes, size_t valid_bytes) {
  Thread& thread = TheMachine().running();
  std::memset(to, kPoison, bytes);
  thread.copies.push_back({to, from, bytes, valid_bytes, thread.group});
}

void CommitCopies() {
  ++TheMachine().running().group;
}

void WaitForCopies(int groups_left) {
  Thread& thread = TheMachine().running();
  std::erase_if(thread.copies, [&](const PendingCopy& copy) {
    if (copy.group >= thread.group - groups_left) return false;
    std::memset(copy.to, 0, copy.bytes);
    std::memcpy(copy.to, copy.from, copy.valid_bytes);
    return true;
  });
}

}  // namespace tessera::emulation

// What CudaQueue calls, where the toolkit's library is not linked.
extern "C" __attribute__((weak)) const char* cudaGetErrorName(cudaError_t) {
  return "cudaError";
}
extern "C" __attribute__((weak)) const char* cudaGetErrorString(cudaError_t) {
  return "error of the emulation";
}
