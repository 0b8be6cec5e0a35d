// Table lookup: y[b,s,h] = table[ids[b,s], h]. Ids address v: rows outside a
// shard's range read as zero, so that splitting v leaves a partial sum. Rows
// behind the first `vocabulary`, where that is given, are padding that no id
// reads (planner/ir/vocabulary.h).
//
// A bag is several ids of a sample, whose rows are added up, or with `mean`
// averaged (torch.nn.EmbeddingBag): y[b,h] = sum over n of table[ids[b,n], h].
// Negative ids are padding: they have no row and do not count.

#include "planner/ir/op.h"
#include "planner/ir/vocabulary.h"

namespace tessera {
namespace {

// A lookup reads one row a token and writes it; the gradient reads one row and
// reads and writes another. The table itself is not swept. Neither counts
// FLOPs: the ids decide which shard of a table has the work.
template <int kRowsPerToken>
Bytes RowBytes(const OpCall& call) {
  const int64_t tokens = call.Extent('b') * call.Extent('s');
  const int64_t row = call.Extent('h') * SizeOf(call.result_dtypes[0]);
  return {tokens * (kRowsPerToken * row + SizeOf(DType::kInt32))};
}

// The same of bags: a row of the table for each id, read, or read and written,
// and one for each bag.
template <int kRowsPerId>
Bytes BagBytes(const OpCall& call) {
  const int64_t bags = call.Extent('b');
  const int64_t ids = bags * call.Extent('n');
  const int64_t row = call.Extent('h') * SizeOf(call.result_dtypes[0]);
  return {(ids * kRowsPerId + bags) * row + ids * SizeOf(DType::kInt32)};
}

std::string Problem(const OpCall& call) {
  return VocabularyProblem(call.attributes, call.Extent('v'));
}

}  // namespace

std::vector<OpDef> EmbeddingOps() {
  return {
      {.name = "embedding",
       .summary = "rows of a table, by id",
       .rule = "bs,vh->bsh",
       .adjoints = {{"embedding_dw", "dy0,x0->dx1"}},
       .bytes = RowBytes<2>,
       .attributes = {{.name = kVocabulary,
                       .least = 1,
                       .whole = true,
                       .list = true}},  // of none or one
       .problem = Problem,
       .integer_operands = {0},
       .linear = {{1}}},
      {.name = "embedding_dw",
       .summary = "gradient of embedding's table",
       .bytes = RowBytes<3>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "embedding_bag",
       .summary = "sums, or means, of rows of a table, by the ids of each bag",
       .rule = "bn!,vh->bh",
       .adjoints = {{"embedding_bag_dw", "dy0,x0->dx1"}},
       .bytes = BagBytes<1>,
       .attributes = {{.name = "mean", .least = 0, .most = 1, .whole = true}},
       .integer_operands = {0},
       .linear = {{1}}},
      {.name = "embedding_bag_dw",
       .summary = "gradient of embedding_bag's table",
       .bytes = BagBytes<2>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
  };
}

}  // namespace tessera
