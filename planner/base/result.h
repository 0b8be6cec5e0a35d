#pragma once
// Result<T>: a value or an Error, with the member names of std::expected
// (which nvcc's C++20 lacks), so that the swap is one `using` later.
// Used at the seams: files, flags, validation, lowering, running.

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "planner/base/check.h"

namespace tessera {

enum class ErrorCode {
  kInvalidInput,  // The user's file, flag or plan is wrong: exit code 2.
  kNotFound,      // A file or name does not exist: exit code 2.
  kInfeasible,    // Well-formed, but does not fit the cluster: exit code 3.
  kUnavailable,   // A device, peer or system service failed: exit code 1.
  kInterrupted,   // Ctrl-C or SIGTERM.
};

// `where` names the place from the outside in, such as
// "cluster.txtpb: links[1].bandwidth"; it grows outward by At().
struct Error {
  ErrorCode code = ErrorCode::kInvalidInput;
  std::string message;
  std::string where;

  // This error seen from an enclosing place.
  Error At(std::string_view outer) const;
  // "where: message", on one line.
  std::string ToString() const;
  bool operator==(const Error&) const = default;
};

inline Error InvalidInput(std::string message, std::string where = "") {
  return {ErrorCode::kInvalidInput, std::move(message), std::move(where)};
}

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool has_value() const { return state_.index() == 0; }
  explicit operator bool() const { return has_value(); }

  // REQUIRES: has_value().
  T& value() & {
    TESSERA_CHECK(has_value()) << error().ToString();
    return std::get<0>(state_);
  }
  const T& value() const& {
    TESSERA_CHECK(has_value()) << error().ToString();
    return std::get<0>(state_);
  }
  T&& value() && {
    TESSERA_CHECK(has_value()) << error().ToString();
    return std::get<0>(std::move(state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  // REQUIRES: !has_value().
  const Error& error() const { return std::get<1>(state_); }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}

  bool has_value() const { return !error_.has_value(); }
  explicit operator bool() const { return has_value(); }
  const Error& error() const { return *error_; }

 private:
  std::optional<Error> error_;
};

}  // namespace tessera

#define TESSERA_CONCAT_INNER(a, b) a##b
#define TESSERA_CONCAT(a, b) TESSERA_CONCAT_INNER(a, b)

// TESSERA_TRY(auto graph, ReadGraph(path)): binds the value or returns the
// error. A full statement on its own line.
#define TESSERA_TRY(binding, expression)                 \
  auto TESSERA_CONCAT(result_, __LINE__) = (expression); \
  if (!TESSERA_CONCAT(result_, __LINE__).has_value())    \
    return TESSERA_CONCAT(result_, __LINE__).error();    \
  binding = std::move(TESSERA_CONCAT(result_, __LINE__)).value()

#define TESSERA_RETURN_IF_ERROR(expression) \
  if (auto result_ = (expression); !result_.has_value()) return result_.error()
