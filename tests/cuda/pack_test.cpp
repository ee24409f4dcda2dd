// The pack: written, read back, damaged.
#include "cuda/driver/pack.h"

#include "scratch.h"

namespace tessera::cuda {
namespace {

Digest key_of(const std::string& name) { return Sha256().add_text(name).finish(); }

PackedCubin made_up(const std::string& name, std::size_t size) {
  PackedCubin packed{key_of(name), {}};
  for (std::size_t i = 0; i < size; ++i) packed.cubin.image.push_back(static_cast<std::byte>(i * i >> 3));
  packed.cubin.resources = {static_cast<int>(name.size()), 1, 2, 3};
  return packed;
}

bool same(const std::optional<Cubin>& a, const Cubin& b) {
  return a && a->image == b.image && a->resources.registers == b.resources.registers &&
         a->resources.spill_bytes == b.resources.spill_bytes &&
         a->resources.stack_bytes == b.resources.stack_bytes &&
         a->resources.shared_bytes == b.resources.shared_bytes;
}

TEST(Pack, GivesBackWhatWasPacked) {
  const Scratch scratch;
  std::vector<PackedCubin> cubins;
  for (int i = 0; i < 50; ++i) cubins.push_back(made_up("kernel" + std::string(i, '+'), 1000 * i));
  cubins.push_back(cubins.front());  // twice
  ASSERT_TRUE(write_pack(scratch / "p", cubins, "13.0").ok());
  const Pack pack(scratch / "p");
  EXPECT_EQ(pack.size(), 50U);
  EXPECT_EQ(pack.compiler(), "13.0");
  for (const PackedCubin& packed : cubins) EXPECT_TRUE(same(pack.find(packed.key), packed.cubin));
  EXPECT_FALSE(pack.find(key_of("not in it")));
  EXPECT_FALSE(std::filesystem::exists(scratch / "p.new"));
}

TEST(Pack, AnAbsentOrForeignFileIsAnEmptyPack) {
  const Scratch scratch;
  write_text(scratch / "text",
             "this is no pack, though it is long enough to hold the header of one, and more");
  write_text(scratch / "empty", "");
  for (const std::filesystem::path& path :
       {scratch / "absent", scratch / "text", scratch / "empty", scratch.path()}) {
    const Pack pack(path);
    EXPECT_EQ(pack.size(), 0U) << path;
    EXPECT_FALSE(pack.find(key_of("a"))) << path;
  }
}

// Whatever byte is wrong and wherever it ends: an entry is right or not there.
TEST(Pack, DamageIsSeen) {
  const Scratch scratch;
  const std::vector<PackedCubin> cubins = {made_up("a", 400), made_up("b", 300)};
  ASSERT_TRUE(write_pack(scratch / "p", cubins, "13.0").ok());
  const std::string good = read_text(scratch / "p");
  const auto check = [&](const std::string& bad) {
    write_text(scratch / "p", bad);
    const Pack pack(scratch / "p");
    int right = 0;
    for (const PackedCubin& packed : cubins) {
      const std::optional<Cubin> found = pack.find(packed.key);
      if (!found) continue;
      EXPECT_TRUE(same(found, packed.cubin));
      ++right;
    }
    return right;
  };
  EXPECT_EQ(check(good), 2);
  int unseen = 0;
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x20);
    // A bit of a frame's header that says nothing may pass unseen; the image is right all the same.
    unseen += check(bad) == 2 ? 1 : 0;
  }
  EXPECT_LE(unseen, 4);
  for (std::size_t size = 0; size < good.size(); ++size) EXPECT_LT(check(good.substr(0, size)), 2) << size;
}

TEST(Pack, AFileCutWhileOpenGivesNothing) {
  const Scratch scratch;
  const PackedCubin packed = made_up("a", 100'000);
  ASSERT_TRUE(write_pack(scratch / "p", {packed}, "13.0").ok());
  const Pack pack(scratch / "p");
  std::filesystem::resize_file(scratch / "p", 200);
  EXPECT_FALSE(pack.find(packed.key));
}

TEST(Pack, AFolderThatCannotBeWrittenIsAnError) {
  const Status status = write_pack("/proc/none/p", {}, "");
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("/proc/none/p"), std::string::npos);
}

TEST(Pack, LiesBesideTheProgramOrWhereTheVariableSays) {
  ::unsetenv("TESSERA_PACK");
  EXPECT_EQ(Pack::default_path().filename(), "tessera.pack");
  ::setenv("TESSERA_PACK", "/x/y.pack", 1);
  EXPECT_EQ(Pack::default_path(), "/x/y.pack");
  ::unsetenv("TESSERA_PACK");
}

}  // namespace
}  // namespace tessera::cuda
