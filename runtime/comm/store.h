#pragma once
// A small key-value store over TCP, by which the ranks of a job find each
// other. Rank 0 serves it from a thread of its own and uses it like the others.
//
// Keys are at most 256 bytes and values 1 MiB; a connection that sends anything
// else, another protocol or another job's id is closed and harms nobody.
// A Store belongs to one thread at a time.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "planner/base/result.h"
#include "planner/base/units.h"

namespace tessera {

struct StoreOptions {
  // A name or an IPv4 or IPv6 address. Rank 0 listens there; on all addresses
  // where a name that other hosts may know is a loopback address on its own.
  std::string host = "127.0.0.1";
  int port = 0;
  std::string job_id;  // the same for all ranks of a job; at most 256 bytes
  int rank = 0;        // rank 0 serves
  int size = 1;        // the number of the job's ranks
  // A socket that already listens on host:port, for rank 0; it is closed by
  // the store. -1: rank 0 binds the port itself.
  int listen_fd = -1;
  // How long ranks try to connect: rank 0 may start later than the others.
  Duration connect_timeout = Duration::FromSeconds(60);
};

class Store {
 public:
  // REQUIRES: 0 <= rank < size.
  // Errors (kUnavailable): the port is in use, the host is unknown, nobody
  // answers in time, who answers is not this job's store, or this rank has come
  // to it before. kInvalidInput: rank 0 has another `size`; while ranks of its
  // own have not come yet, whatever is asked then and later returns that error
  // on every rank.
  static Result<std::unique_ptr<Store>> Open(const StoreOptions& options);

  // On rank 0 waits, at most 5 s, until the other ranks have closed theirs and,
  // where ranks disagree, until all have been told.
  virtual ~Store() = default;

  virtual Result<void> Set(std::string_view key, std::string_view value) = 0;
  // The value of `key`, as soon as somebody has set it. After `timeout` the
  // error says that `what` was waited for in vain.
  virtual Result<std::string> Get(std::string_view key, Duration timeout,
                                  std::string_view what) = 0;
  // Adds to a counter that starts at 0; its new value.
  virtual Result<int64_t> Add(std::string_view key, int64_t delta) = 0;

  // Returns when `count` callers have called it. `name` is used once.
  Result<void> Barrier(std::string_view name, int count, Duration timeout);
};

// A socket that listens on a free port of the loopback interface, to be handed
// to rank 0 as StoreOptions::listen_fd.
struct ListeningSocket {
  int fd = -1;  // close-on-exec is not set
  int port = 0;
};
Result<ListeningSocket> ListenOnLoopback();

}  // namespace tessera
