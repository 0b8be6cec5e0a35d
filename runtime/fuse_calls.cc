#include "runtime/fuse_calls.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "planner/lower/fused_kernels.h"
#include "runtime/kernels/extent.h"

namespace tessera {
namespace {

// Tasks keep their places: a fused call stands at the first one's, and the
// second one's task is empty. So what the second one reads has to be there
// before the first one, by the order of computation alone, and nothing else may
// use what it writes until then. A late call stands at the second one's, and
// nothing may use in between what the first one writes.
class Fuser {
 public:
  Fuser(const RankView& view, const RankDevice& device, StepBuffers& buffers,
        std::vector<TaskWork>& work)
      : view_(view),
        tasks_(view.tasks()),
        device_(device),
        buffers_(buffers),
        work_(work),
        uses_(tasks_.values.size()),
        gone_(work.size(), false),
        done_by_(work.size()),
        work_of_(tasks_.tasks.size(), work.size()) {
    std::iota(done_by_.begin(), done_by_.end(), size_t{0});
    for (size_t w = 0; w < work_.size(); ++w) {
      const Task& task = tasks_.task(work_[w].task);
      work_of_[work_[w].task.index()] = w;
      for (ValueId value : task.reads) uses_[Root(value)].push_back({w, false});
      for (ValueId value : task.writes) uses_[Root(value)].push_back({w, true});
    }
  }

  void Run() {
    for (size_t w = 0; w < work_.size(); ++w) AddIntoOneSum(w);
    for (size_t w = 0; w < work_.size(); ++w) {
      while (FuseOnce(w)) {
      }
    }
    for (const std::vector<size_t>& products : sums_) MakeOneProduct(products);
  }

 private:
  struct Use {
    size_t work;
    bool writes;
  };

  size_t Root(ValueId value) const { return buffers_.root(value).index(); }
  const std::vector<Use>& UsesOf(ValueId value) const {
    return uses_[Root(value)];
  }
  bool IsPersistent(ValueId value) const {
    return tasks_.values[Root(value)].persistent;
  }
  bool Computes(size_t w) const {
    const Task& task = tasks_.task(work_[w].task);
    return task.kind == TaskKind::kCompute &&
           task.stream == StreamRole::kCompute && !OnHost(task, tasks_.values);
  }
  bool IsPlain(size_t w) const {
    return Computes(w) && !work_[w].calls.empty() && work_[w].zeroes.empty();
  }
  static bool IsList(const TaskWork& work) { return !work.launches.empty(); }

  // Whether a value that `second` reads is there before `first`.
  bool IsThereBefore(ValueId value, size_t first, size_t second) const {
    const Use* writer = nullptr;
    for (const Use& use : UsesOf(value)) {
      if (use.writes && use.work < second) writer = &use;
    }
    return writer == nullptr ||
           (writer->work < first && Computes(writer->work));
  }
  // Whether a value that `second` writes may be written by `first`.
  bool IsFreeBefore(ValueId value, size_t first, size_t second) const {
    return std::ranges::all_of(UsesOf(value), [&](const Use& use) {
      return use.work >= second || (use.work < first && Computes(use.work));
    });
  }
  // Whether what `first` does with a value can be done by `second`. What waits
  // for `first` on another stream would not wait for that.
  bool CanBeLater(ValueId value, bool writes, size_t first,
                  size_t second) const {
    return std::ranges::none_of(UsesOf(value), [&](const Use& use) {
      if (use.work <= first || use.work == second) return false;
      if (!writes && !use.writes) return false;
      return use.work < second || !Computes(use.work);
    });
  }
  bool CanBeLater(const TaskCall& call, size_t first, size_t second) const {
    const auto can = [&](bool writes) {
      return [=, this](ValueId value) {
        return value.valid() && CanBeLater(value, writes, first, second);
      };
    };
    return std::ranges::all_of(call.reads, can(false)) &&
           std::ranges::all_of(call.writes, can(true));
  }
  // Whether only these two use it.
  bool IsBetween(ValueId value, size_t first, size_t second) const {
    return !IsPersistent(value) &&
           std::ranges::all_of(UsesOf(value), [&](const Use& use) {
             return use.work == first || use.work == second;
           });
  }

  bool FuseOnce(size_t w) {
    if (!IsPlain(w)) return false;
    const std::string_view name = work_[w].calls[0].kernel->name;
    return std::ranges::any_of(FusedKernels(), [&](const FusedKernel& fused) {
      return fused.first == name &&
             device_.FindFusedKernel(fused.name) != nullptr &&
             FuseWithLater(w, fused);
    });
  }

  // With the first later task for which it can be.
  bool FuseWithLater(size_t first, const FusedKernel& fused) {
    const bool chain = fused.kind == FusedKernel::Kind::kChain;
    const TaskCall& call = work_[first].calls[0];
    const std::vector<ValueId>& values = chain ? call.writes : call.reads;
    if (values.empty() || !values[0].valid()) return false;
    const ValueId shared = values[0];
    for (const Use& use : UsesOf(shared)) {
      if (use.work <= first || gone_[use.work]) continue;
      if (use.writes) return false;
      if (CanFuse(first, use.work, fused)) {
        Fuse(first, use.work, fused);
        return true;
      }
    }
    return false;
  }

  bool CanFuse(size_t first, size_t second, const FusedKernel& fused) const {
    const TaskWork& a = work_[first];
    const TaskWork& b = work_[second];
    if (!IsPlain(second) || a.calls.size() != b.calls.size() ||
        IsList(a) != IsList(b) || (!IsList(a) && a.calls.size() > 1)) {
      return false;
    }
    for (size_t i = 0; i < a.calls.size(); ++i) {
      if (b.calls[i].kernel->name != fused.second) return false;
      if (fused.alike &&
          !(HasOneShape(*a.calls[i].rule) && HasOneShape(*b.calls[i].rule))) {
        return false;
      }
      const bool can = fused.kind == FusedKernel::Kind::kChain
                           ? AreChain(first, second, i, fused)
                           : AreSiblings(first, second, i, fused);
      if (!can) return false;
      if (fused.late) {
        if (!CanBeLater(a.calls[i], first, second)) return false;
        continue;
      }
      for (ValueId written : b.calls[i].writes) {
        if (!IsFreeBefore(written, first, second)) return false;
      }
    }
    return true;
  }

  // Where the first one's result stands among the operands of the second.
  static size_t PlaceInChain(const TaskCall& a, const TaskCall& b) {
    return static_cast<size_t>(std::ranges::find(b.reads, a.writes[0]) -
                               b.reads.begin());
  }

  bool AreChain(size_t first, size_t second, size_t i,
                const FusedKernel& fused) const {
    const TaskCall& a = work_[first].calls[i];
    const TaskCall& b = work_[second].calls[i];
    const size_t place = PlaceInChain(a, b);
    // What is added to is never the first result of a fused kernel.
    const bool adds =
        a.accumulate && a.kernel->name.find('+') == std::string_view::npos;
    if (place == b.reads.size() || adds || !AddAlike(a, b, fused) ||
        (fused.operand != FusedKernel::kAnyOperand && fused.operand != place) ||
        (!fused.keeps_first && !IsBetween(a.writes[0], first, second))) {
      return false;
    }
    for (size_t r = 0; r < b.reads.size(); ++r) {
      if (r == place) continue;
      if (!b.reads[r].valid() || b.reads[r] == a.writes[0] ||
          (!fused.late && !IsThereBefore(b.reads[r], first, second))) {
        return false;
      }
    }
    return true;
  }

  // Or branches.
  bool AreSiblings(size_t first, size_t second, size_t i,
                   const FusedKernel& fused) const {
    const TaskCall& a = work_[first].calls[i];
    const TaskCall& b = work_[second].calls[i];
    const bool branches = fused.kind == FusedKernel::Kind::kBranches;
    return a.reads[0] == b.reads[0] && AddAlike(a, b, fused) &&
           std::ranges::all_of(b.reads, [&](ValueId read) {
             return read.valid() &&
                    (std::ranges::count(a.reads, read) > 0 ||
                     (branches && IsThereBefore(read, first, second)));
           });
  }

  // One flag says for both calls whether they add to results.
  static bool AddAlike(const TaskCall& a, const TaskCall& b,
                       const FusedKernel& fused) {
    return (a.accumulate == b.accumulate || !a.kernel->accumulates) &&
           (!b.accumulate || fused.accumulates);
  }

  // What task `from` does with a value, task `to` does.
  void UseLater(ValueId value, size_t from, size_t to) {
    std::vector<Use>& uses = uses_[Root(value)];
    for (Use& use : uses) {
      if (use.work == from) use.work = to;
    }
    std::ranges::stable_sort(uses, {}, &Use::work);
  }

  void Fuse(size_t first, size_t second, const FusedKernel& fused) {
    for (size_t i = 0; i < work_[first].calls.size(); ++i) {
      TaskCall& a = work_[first].calls[i];
      TaskCall& b = work_[second].calls[i];
      if (fused.kind != FusedKernel::Kind::kSiblings) {
        const size_t place =
            fused.kind == FusedKernel::Kind::kChain ? PlaceInChain(a, b) : 0;
        for (size_t r = 0; r < b.reads.size(); ++r) {
          if (r == place) continue;
          a.reads.push_back(b.reads[r]);
          a.operands.push_back(b.operands[r]);
        }
        if (!fused.keeps_first) {
          buffers_.Drop(a.writes[0]);
          a.writes.erase(a.writes.begin());
          a.results.erase(a.results.begin());
        }
      }
      for (size_t k = 0; k < b.writes.size(); ++k) {
        a.writes.push_back(b.writes[k]);
        a.results.push_back(b.results[k]);
        if (!fused.late) work_[first].also_uses.push_back(b.writes[k]);
      }
      a.attributes.insert(a.attributes.end(), b.attributes.begin(),
                          b.attributes.end());
      a.kernel = device_.FindFusedKernel(fused.name);
      a.accumulate = b.accumulate;
      a.alone = a.alone && b.alone;
    }
    if (fused.late) {
      for (const TaskCall& call : work_[first].calls) {
        for (const auto* values : {&call.reads, &call.writes}) {
          for (ValueId value : *values) {
            work_[second].also_uses.push_back(value);
            UseLater(value, first, second);
          }
        }
      }
      std::swap(work_[first].calls, work_[second].calls);
      std::swap(first, second);
    }
    gone_[second] = true;
    done_by_[second] = first;
    work_[second].calls.clear();
    work_[second].launches.clear();
    if (IsList(work_[first])) PlanLaunches(work_[first]);
  }

  // A sum of products (the gradients of what queries, keys and values are made
  // of): each of them adds to the first one's result.
  void AddIntoOneSum(size_t w) {
    if (!IsPlain(w) || IsList(work_[w])) return;
    TaskCall& sum = work_[w].calls[0];
    if (sum.kernel->name != "sum" || sum.accumulate || sum.reads.size() < 2) {
      return;
    }
    const ValueId total = sum.writes[0];
    std::vector<size_t> writers;
    for (ValueId term : sum.reads) {
      if (!term.valid()) return;
      const size_t writer = UsesOf(term).front().work;
      const TaskWork& work = work_[writer];
      if (!IsPlain(writer) || IsList(work) ||
          work.calls[0].kernel->name != "linear_dx" ||
          !work.calls[0].kernel->accumulates || work.calls[0].accumulate ||
          work.calls[0].writes[0] != term || !IsBetween(term, writer, w) ||
          tasks_.value(term).dtype != tasks_.value(total).dtype) {
        return;
      }
      writers.push_back(writer);
    }
    std::ranges::sort(writers);
    if (std::ranges::adjacent_find(writers) != writers.end() ||
        !IsFreeBefore(total, writers[0], w)) {
      return;
    }
    for (size_t writer : writers) {
      TaskCall& call = work_[writer].calls[0];
      buffers_.Drop(call.writes[0]);
      call.writes = sum.writes;
      call.results = sum.results;
      call.accumulate = writer != writers[0];
      work_[writer].also_uses.push_back(total);
    }
    gone_[w] = true;
    work_[w].calls.clear();
    sums_.push_back(std::move(writers));
  }

  // dy w -> dx, by extents: dy is rows x columns, w columns x width.
  struct Factor {
    size_t work = 0;
    ValueId dy;
    ValueId w;
    int64_t rows = 0;
    int64_t columns = 0;
    int64_t width = 0;
  };

  // Products that add to one result, as one product of all their columns: their
  // weights lie one behind the other, and the kernels that make what is
  // multiplied (the gradients of queries, keys and values) write it side by
  // side, row by row. It runs where the last of them would.
  void MakeOneProduct(const std::vector<size_t>& products) {
    std::vector<Factor> factors;
    for (size_t work : products) {
      const auto factor = FactorOf(work, products.back());
      if (!factor) return;
      factors.push_back(*factor);
    }
    std::ranges::sort(factors, {}, &Factor::w);
    const DType dtype = tasks_.value(factors[0].dy).dtype;
    std::vector<ValueId> weights;
    int64_t columns = 0;
    for (const Factor& factor : factors) {
      if (tasks_.value(factor.dy).dtype != dtype ||
          tasks_.value(factor.w).dtype != dtype ||
          factor.rows != factors[0].rows || factor.width != factors[0].width ||
          std::ranges::count(factors, factor.dy, &Factor::dy) != 1 ||
          !MayHaveGaps(factor.dy, products)) {
        return;
      }
      weights.push_back(factor.w);
      columns += factor.columns;
    }
    if (!buffers_.LayTogether(weights)) return;

    const ValueId first = factors[0].dy;
    for (const Factor& factor : factors) {
      for (const Use& use : UsesOf(factor.dy)) {
        for (TaskCall& call : work_[DoneBy(use.work)].calls) {
          SetRows(call.reads, call.operands, factor, columns);
          SetRows(call.writes, call.results, factor, columns);
        }
      }
    }
    int64_t before = 0;
    for (const Factor& factor : factors) {
      buffers_.Join(factor.dy, first, {before * SizeOf(dtype)});
      before += factor.columns;
    }
    buffers_.Resize(first, {factors[0].rows * columns * SizeOf(dtype)});

    static const auto* const kRule =
        new IndexRule(IndexRule::Parse("mn,nk->mk").value());
    TaskCall& call = work_[products.back()].calls[0];
    call.rule = kRule;
    call.reads = {first, weights[0]};
    call.operands = {Matrix(dtype, factors[0].rows, columns),
                     Matrix(dtype, columns, factors[0].width)};
    call.accumulate = false;
    for (const Factor& factor : factors) {
      work_[products.back()].shares.emplace_back(factor.work, factor.columns);
    }
    for (size_t work : products) {
      if (work == products.back()) continue;
      call.alone = call.alone && work_[work].calls[0].alone;
      work_[work].calls.clear();
      std::erase(work_[work].also_uses, call.writes[0]);
      gone_[work] = true;
    }
  }

  // Nothing where the product cannot be made by task `last`.
  std::optional<Factor> FactorOf(size_t work, size_t last) const {
    if (!IsPlain(work)) return std::nullopt;
    const TaskCall& call = work_[work].calls[0];
    if (call.kernel->name != "linear_dx" || call.reads.size() != 2 ||
        !call.reads[0].valid() || !call.reads[1].valid()) {
      return std::nullopt;
    }
    if (IsOverwritten(call.reads[1], work, last)) return std::nullopt;
    KernelCall extents;
    extents.rule = call.rule;
    extents.operands = call.operands;
    Factor factor = {work, call.reads[0], call.reads[1]};
    factor.rows = Extent(extents, 0, 1, /*shared=*/false);
    factor.columns = Extent(extents, 0, 1, /*shared=*/true);
    factor.width = Extent(extents, 1, 0, /*shared=*/false);
    constexpr int64_t kVector = 8;  // Kernel::rows_apart
    if (factor.columns % kVector != 0) return std::nullopt;
    return factor;
  }

  // Whether something writes a value behind `first` that might not wait for
  // `second`, as it does for `first`: on another stream, it has to wait for a
  // later computation.
  bool IsOverwritten(ValueId value, size_t first, size_t second) const {
    return std::ranges::any_of(UsesOf(value), [&](const Use& use) {
      if (!use.writes || use.work <= first) return false;
      if (use.work < second) return true;
      const Task& writer = tasks_.task(work_[use.work].task);
      return !Computes(use.work) &&
             std::ranges::none_of(writer.deps, [&](TaskId dep) {
               const size_t work = work_of_[dep.index()];
               return work < work_.size() && work >= second && Computes(work);
             });
    });
  }

  // Whether rows of a buffer may lie apart: all kernels that use it but the
  // products take that, and it is this value's alone.
  bool MayHaveGaps(ValueId value, const std::vector<size_t>& products) const {
    if (buffers_.root(value) != value || IsPersistent(value) ||
        buffers_.size(value) != view_.BytesOf(value)) {
      return false;
    }
    size_t writers = 0;
    for (const Use& use : UsesOf(value)) {
      writers += use.writes;
      const size_t work = DoneBy(use.work);
      if (!IsPlain(work) || work_[work].calls.size() != 1) return false;
      const TaskCall& call = work_[work].calls[0];
      const auto reads = std::ranges::count(call.reads, value);
      if (use.writes) {
        if (call.kernel->rows_apart != RowsApart::kResults || call.accumulate ||
            reads > 0 || std::ranges::count(call.writes, value) != 1 ||
            !HasOneType(call)) {
          return false;
        }
        continue;
      }
      const bool takes = call.kernel->rows_apart == RowsApart::kFirstOperand ||
                         std::ranges::count(products, work) > 0;
      if (!takes || reads != 1 || call.reads[0] != value) return false;
    }
    return writers == 1;
  }

  // Of fused kernels, as Kernel::rows_apart asks for.
  bool HasOneType(const TaskCall& call) const {
    if (call.kernel != device_.FindFusedKernel(call.kernel->name)) {
      return true;
    }
    const auto alike = [&](const LocalTensor& tensor) {
      return tensor.dtype == call.results[0].dtype;
    };
    return std::ranges::all_of(call.operands, alike) &&
           std::ranges::all_of(call.results, alike);
  }

  // Whose call does what a task's did.
  size_t DoneBy(size_t work) const {
    while (done_by_[work] != work) work = done_by_[work];
    return work;
  }

  static void SetRows(const std::vector<ValueId>& values,
                      std::vector<LocalTensor>& tensors, const Factor& factor,
                      int64_t stride) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i] != factor.dy) continue;
      tensors[i].row = factor.columns;
      tensors[i].row_stride = stride;
    }
  }

  static LocalTensor Matrix(DType dtype, int64_t rows, int64_t columns) {
    LocalTensor matrix;
    matrix.dtype = dtype;
    matrix.shape = {rows, columns};
    matrix.offset = {0, 0};
    matrix.global_shape = matrix.shape;
    return matrix;
  }

  const RankView& view_;
  const TaskGraph& tasks_;
  const RankDevice& device_;
  StepBuffers& buffers_;
  std::vector<TaskWork>& work_;
  std::vector<std::vector<Use>> uses_;     // by root
  std::vector<bool> gone_;                 // has become part of other calls
  std::vector<size_t> done_by_;            // whose calls these then are
  std::vector<size_t> work_of_;            // by task; none: the number of all
  std::vector<std::vector<size_t>> sums_;  // products that add to one result
};

}  // namespace

void FuseCalls(const RankView& view, const RankDevice& device,
               StepBuffers& buffers, std::vector<TaskWork>& work) {
  const bool can =
      device.fuses() &&
      std::ranges::any_of(FusedKernels(), [&](const FusedKernel& fused) {
        return device.FindFusedKernel(fused.name) != nullptr;
      });
  if (can) Fuser(view, device, buffers, work).Run();
}

}  // namespace tessera
