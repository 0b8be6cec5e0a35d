#include "costmodel/evaluate/surroundings.h"

#include <algorithm>

namespace tessera {
namespace {

int64_t Pair(int64_t a, int64_t b) {
  return a << 32 | b;
}

void Append(const Layout& layout, IntKey& key) {
  key.insert(key.end(), layout.dims.begin(), layout.dims.end());
  key.insert(key.end(),
             {Pair(layout.partial, layout.flat),
              Pair(layout.rooted, layout.ring), layout.turn, layout.tile.dim,
              Pair(layout.tile.index, layout.tile.count)});
  for (const Halo& halo : layout.halos) {
    key.insert(key.end(), {halo.dim, halo.before, halo.after});
  }
}

class Appender {
 public:
  Appender(const LoweringContext& context, int block, const BlockShape& shape,
           int prefetch, const std::function<int64_t(GroupId)>& number_of,
           IntKey& key)
      : context_(context),
        graph_(context.graph()),
        block_(block),
        shape_(shape),
        prefetch_(prefetch),
        number_of_(number_of),
        key_(key) {}

  void Run(bool splits) {
    for (TensorId id : shape_.shared) {
      if (graph_.tensor(id).kind == TensorKind::kWeight) {
        AppendWeight(id);
      } else {
        AppendTensor(id);
      }
    }
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      for (NodeId node :
           context_.nodes_of_block(pass)[static_cast<size_t>(block_)]) {
        key_.push_back(context_.passes_partial(node));
      }
    }
    AppendFetched(ActionKind::kForward);
    if (splits) {
      AppendFetched(ActionKind::kBackwardInput);
      AppendFetched(ActionKind::kBackwardWeight);
    } else {
      AppendFetched(ActionKind::kBackward);
    }
  }

 private:
  void AppendTensor(TensorId id) {
    Append(context_.produced(id), key_);
    key_.push_back(context_.kept_as_produced(id));
    key_.push_back(context_.recomputed(id).valid());
    key_.push_back(std::ssize(context_.presences(id)));
    for (const LoweringContext::Presence& presence : context_.presences(id)) {
      key_.push_back(number_of_(presence.group));
      key_.push_back(presence.first_block - block_);
      key_.push_back(static_cast<int64_t>(presence.first_part));
      Append(presence.layout, key_);
      // Programs ask whether there are such readers, in their block and in
      // others.
      int64_t readers = 0;
      for (const auto& reader : presence.readers) {
        const int bit = 2 * static_cast<int>(reader.part) +
                        (reader.block == block_ ? 1 : 0);
        readers |= int64_t{1} << bit;
      }
      key_.push_back(readers);
    }
  }

  void AppendWeight(TensorId id) {
    const WeightPlacement& placement = context_.weight_placement(id);
    key_.push_back(placement.zero_stage);
    key_.push_back(placement.zero_axes);
    key_.push_back(context_.tiles(id));
    key_.push_back(std::ssize(context_.replicas(id)));
    for (const LoweringContext::Replica& replica : context_.replicas(id)) {
      key_.push_back(number_of_(replica.group));
      key_.push_back(replica.block - block_);
      key_.push_back(replica.one_chunk);
      Append(replica.layout, key_);
      key_.push_back(std::ssize(replica.gradients));
      for (const Layout& layout : replica.gradients) Append(layout, key_);
    }
  }

  // The weights that the block fetches, for itself and ahead of others.
  void AppendFetched(ActionKind action) {
    const Pass pass =
        action == ActionKind::kForward ? Pass::kForward : Pass::kBackward;
    for (int ahead = 0; ahead <= prefetch_; ++ahead) {
      const int other = context_.BlockAhead(block_, pass, ahead);
      if (other < 0) break;
      for (TensorId id : context_.FetchedWeights(other, action)) {
        key_.push_back(shape_.NumberOf(id));
        if (other != block_) AppendWeight(id);
      }
      key_.push_back(-1);
    }
  }

  const LoweringContext& context_;
  const Graph& graph_;
  const int block_;
  const BlockShape& shape_;
  const int prefetch_;
  const std::function<int64_t(GroupId)>& number_of_;
  IntKey& key_;
};

}  // namespace

void AppendSurroundings(const LoweringContext& context, int block,
                        const BlockShape& shape, int prefetch, bool splits,
                        const std::function<int64_t(GroupId)>& number_of,
                        IntKey& key) {
  Appender(context, block, shape, prefetch, number_of, key).Run(splits);
}

}  // namespace tessera
