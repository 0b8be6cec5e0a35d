#pragma once
// A small key-value store over TCP, by which the ranks of a job find each
// other. Rank 0 serves it from a thread of its own and uses it like the others.
//
// Keys are at most 256 bytes and values 1 MiB; a connection that sends anything
// else, another protocol or another job's id is closed and harms nobody.
// A Store belongs to one thread at a time.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "planner/base/result.h"
#include "planner/base/units.h"

namespace tessera {

struct StoreOptions {
  // A name or an IPv4 or IPv6 address, by which the others reach rank 0.
  std::string host = "127.0.0.1";
  int port = 0;
  std::string job_id;  // the same for all ranks of a job; at most 256 bytes
  int rank = 0;        // rank 0 serves
  int size = 1;        // the number of the job's ranks
  // Rank 0 listens on all addresses of its host: to it `host` may be another
  // one than to other hosts (a loopback address, in Debian's /etc/hosts), or
  // none of its own (a service of Kubernetes, NAT). On one host it listens at
  // `host`, and on all addresses only where that is none of its own.
  bool several_hosts = false;
  // A socket that already listens on host:port, for rank 0; it is closed by
  // the store. -1: rank 0 binds the port itself.
  int listen_fd = -1;
  // How long ranks may start apart, and how long rank 0 may take to answer.
  Duration timeout = Duration::FromSeconds(120);
  // Told "rank 0" once it has not come for `patience`, and why where its host
  // has no address yet; rank 0, "its host's address". Or empty.
  std::function<void(const std::string& who)> waiting = {};
  Duration patience = Duration::FromSeconds(5);
  // Once true, waits end with kInterrupted within about 0.1 s, but for one for
  // the address of a host, which may take some seconds; or null.
  const std::atomic<bool>* stop = nullptr;
};

// A counter that rank 0's server keeps: once a rank has ended, or its
// connection is lost, without closing its Store, that rank + 1, of the first.
inline constexpr char kGoneKey[] = "gone";

class Store {
 public:
  // REQUIRES: 0 <= rank < size.
  // Errors (kUnavailable): the port is in use, nobody answers in time, the host
  // is unknown until then, this process has no file descriptor or thread left,
  // who answers is not this job's store, or this rank has come to it before.
  // kInvalidInput: rank 0 has another `size`. While ranks of its own have not
  // come yet, such a size ends the job, and so does a rank for which rank 0 has
  // no file descriptor left: whatever is asked then and later returns that
  // error on every rank.
  static Result<std::unique_ptr<Store>> Open(const StoreOptions& options);

  // Says goodbye, for which rank 0 has a second. On rank 0 waits, at most 5 s,
  // until the other ranks have closed theirs and, where the job has ended as
  // Open says, until all have been told.
  virtual ~Store() = default;

  // What follows waits for rank 0's answer. After the first that had none (in
  // time, before an interrupt, or as the connection is lost) all return its
  // error.

  virtual Result<void> Set(std::string_view key, std::string_view value) = 0;
  // The value of `key`, as soon as somebody has set it. After `timeout` the
  // error says that `what` was waited for in vain; `late` tells that from other
  // errors.
  virtual Result<std::string> Get(std::string_view key, Duration timeout,
                                  std::string_view what, bool& late) = 0;
  Result<std::string> Get(std::string_view key, Duration timeout,
                          std::string_view what) {
    bool late = false;
    return Get(key, timeout, what, late);
  }
  // Adds to a counter that starts at 0; its new value.
  virtual Result<int64_t> Add(std::string_view key, int64_t delta) = 0;
  // The same without waiting, which does not end by a timeout either: nothing
  // until the answer is there. The first call for a key asks; the one that
  // returns its answer makes the next the first.
  virtual Result<std::optional<int64_t>> Poll(std::string_view key,
                                              int64_t delta) = 0;

  // Returns when `count` callers have called it. `name` is used once.
  Result<void> Barrier(std::string_view name, int count, Duration timeout);

  // In place of the options' from now on.
  void set_timeout(Duration timeout) { timeout_ = timeout; }
  void set_stop(const std::atomic<bool>* stop) { stop_ = stop; }

  Duration timeout() const { return timeout_; }
  const std::atomic<bool>* stop() const { return stop_; }
  // When the options' timeout is over since Open began.
  std::chrono::steady_clock::time_point deadline() const { return deadline_; }

 protected:
  Store(const StoreOptions& options,
        std::chrono::steady_clock::time_point deadline)
      : timeout_(options.timeout), stop_(options.stop), deadline_(deadline) {}

  Duration timeout_;
  const std::atomic<bool>* stop_;
  const std::chrono::steady_clock::time_point deadline_;
};

// A socket that listens on a free port of the loopback interface, to be handed
// to rank 0 as StoreOptions::listen_fd.
struct ListeningSocket {
  int fd = -1;  // close-on-exec is not set
  int port = 0;
};
Result<ListeningSocket> ListenOnLoopback();

}  // namespace tessera
