// The disk cache: what it gives back is what was put in, or nothing.
#include "cuda/driver/cache.h"

#include <sys/stat.h>
#include <sys/time.h>

#include <chrono>

#include "scratch.h"

namespace tessera::cuda {
namespace {

Digest key_of(const std::string& name) { return Sha256().add_text(name).finish(); }

Cubin made_up_cubin(std::size_t size, int seed = 1) {
  Cubin cubin;
  for (std::size_t i = 0; i < size; ++i)
    cubin.image.push_back(static_cast<std::byte>(i * 7 + static_cast<std::size_t>(seed)));
  cubin.resources = {128 + seed, 0, 16, 1024};
  return cubin;
}

bool same(const std::optional<Cubin>& a, const Cubin& b) {
  return a && a->image == b.image && a->resources.registers == b.resources.registers &&
         a->resources.spill_bytes == b.resources.spill_bytes &&
         a->resources.stack_bytes == b.resources.stack_bytes &&
         a->resources.shared_bytes == b.resources.shared_bytes;
}

mode_t mode_of(const std::filesystem::path& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? status.st_mode & 0777 : 0;
}

std::size_t count_files(const std::filesystem::path& folder, const std::string& part) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    count += entry.path().filename().string().find(part) != std::string::npos ? 1U : 0U;
  return count;
}

TEST(DiskCache, GivesBackWhatWasWritten) {
  const Scratch scratch;
  const DiskCache cache(scratch / "deep/er", DiskCache::default_bytes);
  EXPECT_FALSE(cache.read(key_of("a")));
  cache.write(key_of("a"), made_up_cubin(1000, 1));
  cache.write(key_of("b"), made_up_cubin(5, 2));
  EXPECT_TRUE(same(cache.read(key_of("a")), made_up_cubin(1000, 1)));
  EXPECT_TRUE(same(cache.read(key_of("b")), made_up_cubin(5, 2)));
  cache.write(key_of("a"), made_up_cubin(30, 3));
  EXPECT_TRUE(same(cache.read(key_of("a")), made_up_cubin(30, 3)));
  cache.remove(key_of("a"));
  EXPECT_FALSE(cache.read(key_of("a")));
  EXPECT_EQ(count_files(cache.folder(), "new-"), 0U);
}

TEST(DiskCache, IsPrivate) {
  const Scratch scratch;
  const DiskCache cache(scratch / "made", DiskCache::default_bytes);
  const mode_t old = ::umask(0);
  cache.write(key_of("a"), made_up_cubin(10));
  const File lock = cache.lock(key_of("a"));
  ::umask(old);
  EXPECT_EQ(mode_of(scratch / "made"), 0700U);
  EXPECT_EQ(mode_of(cache.folder()), 0700U);
  for (const auto& entry : std::filesystem::directory_iterator(cache.folder()))
    EXPECT_EQ(mode_of(entry.path()), 0600U) << entry.path();
}

TEST(DiskCache, ACorruptByteAnywhereIsSeenAndTheEntryGoes) {
  const Scratch scratch;
  const DiskCache cache(scratch.path(), DiskCache::default_bytes);
  cache.write(key_of("a"), made_up_cubin(64));
  const auto path = cache.path_of(key_of("a"));
  const std::string good = read_text(path);
  ASSERT_GT(good.size(), 64U);
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x10);
    write_text(path, bad);
    ASSERT_FALSE(cache.read(key_of("a"))) << "byte " << i;
    ASSERT_FALSE(std::filesystem::exists(path)) << "byte " << i;
    write_text(path, good);
    ::chmod(path.c_str(), 0600);
    ASSERT_TRUE(same(cache.read(key_of("a")), made_up_cubin(64)));
  }
}

TEST(DiskCache, ATruncatedOrLengthenedEntryIsSeen) {
  const Scratch scratch;
  const DiskCache cache(scratch.path(), DiskCache::default_bytes);
  cache.write(key_of("a"), made_up_cubin(64));
  const std::string good = read_text(cache.path_of(key_of("a")));
  for (std::size_t size = 0; size < good.size(); ++size) {
    write_text(cache.path_of(key_of("a")), good.substr(0, size));
    ASSERT_FALSE(cache.read(key_of("a"))) << size;
  }
  write_text(cache.path_of(key_of("a")), good + "x");
  EXPECT_FALSE(cache.read(key_of("a")));
}

TEST(DiskCache, AnotherKeysEntryIsRefused) {
  const Scratch scratch;
  const DiskCache cache(scratch.path(), DiskCache::default_bytes);
  cache.write(key_of("a"), made_up_cubin(64));
  std::filesystem::rename(cache.path_of(key_of("a")), cache.path_of(key_of("b")));
  EXPECT_FALSE(cache.read(key_of("b")));
}

TEST(DiskCache, WhatOthersCouldHaveWrittenIsRefused) {
  const Scratch scratch;
  const DiskCache cache(scratch.path(), DiskCache::default_bytes);
  const auto path = cache.path_of(key_of("a"));
  for (const mode_t mode : {0620U, 0602U, 0666U}) {
    cache.write(key_of("a"), made_up_cubin(64));
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    EXPECT_FALSE(cache.read(key_of("a"))) << mode;
  }
  cache.write(key_of("a"), made_up_cubin(64));
  std::filesystem::rename(path, scratch / "elsewhere");
  std::filesystem::create_symlink(scratch / "elsewhere", path);
  EXPECT_FALSE(cache.read(key_of("a"))) << "a symbolic link";
  if (::geteuid() == 0) {
    cache.write(key_of("a"), made_up_cubin(64));
    ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
    EXPECT_FALSE(cache.read(key_of("a"))) << "another user's";
  }
}

TEST(DiskCache, AFolderThatOthersCanWriteIsNotUsed) {
  const Scratch scratch;
  const DiskCache cache(scratch.path(), DiskCache::default_bytes);
  std::filesystem::create_directory(cache.folder());
  ASSERT_EQ(::chmod(cache.folder().c_str(), 0777), 0);
  cache.write(key_of("a"), made_up_cubin(64));
  EXPECT_FALSE(cache.read(key_of("a")));
  EXPECT_FALSE(cache.lock(key_of("a")).is_open());
  EXPECT_TRUE(std::filesystem::is_empty(cache.folder()));
}

TEST(DiskCache, WorksWithoutAPlaceToWrite) {
  // A file where a folder is needed stops root, too.
  const Scratch scratch;
  write_text(scratch / "file", "");
  for (const std::filesystem::path& folder :
       {scratch / "file", scratch / "file/below", std::filesystem::path("/proc/none")}) {
    const DiskCache cache(folder, DiskCache::default_bytes);
    cache.write(key_of("a"), made_up_cubin(64));
    EXPECT_FALSE(cache.read(key_of("a"))) << folder;
    EXPECT_FALSE(cache.lock(key_of("a")).is_open()) << folder;
  }
  if (::geteuid() != 0) {
    ASSERT_EQ(::chmod(scratch.path().c_str(), 0500), 0);
    const DiskCache cache(scratch.path(), DiskCache::default_bytes);
    cache.write(key_of("a"), made_up_cubin(64));
    EXPECT_FALSE(cache.read(key_of("a")));
    ::chmod(scratch.path().c_str(), 0700);
  }
}

TEST(DiskCache, AReadOnlyFolderIsReadFrom) {
  const Scratch scratch;
  const DiskCache cache(scratch.path(), DiskCache::default_bytes);
  cache.write(key_of("a"), made_up_cubin(64));
  ASSERT_EQ(::chmod(cache.folder().c_str(), 0500), 0);
  EXPECT_TRUE(same(cache.read(key_of("a")), made_up_cubin(64)));
  ::chmod(cache.folder().c_str(), 0700);
}

TEST(DiskCache, TheEnvironmentSaysWhere) {
  const auto folder = [](std::map<std::string, std::string> variables) {
    return DiskCache::of(made_up_environment(std::move(variables))).folder().parent_path().string();
  };
  EXPECT_EQ(folder({{"TESSERA_CACHE_DIR", "/a"}, {"XDG_CACHE_HOME", "/b"}, {"HOME", "/c"}}), "/a");
  EXPECT_EQ(folder({{"XDG_CACHE_HOME", "/b"}, {"HOME", "/c"}}), "/b/tessera");
  EXPECT_EQ(folder({{"HOME", "/c"}}), "/c/.cache/tessera");
  EXPECT_EQ(folder({}), "");
  EXPECT_EQ(folder({{"HOME", "/c"}, {"TESSERA_CACHE_BYTES", "0"}}), "");
}

TEST(DiskCache, WithoutAHomeNothingIsWrittenAnywhere) {
  const DiskCache cache = DiskCache::of(made_up_environment({}));
  cache.write(key_of("a"), made_up_cubin(64));
  EXPECT_FALSE(cache.read(key_of("a")));
  EXPECT_FALSE(cache.lock(key_of("a")).is_open());
}

TEST(DiskCache, StaysInItsBoundAndDropsTheLongestUnused) {
  const Scratch scratch;
  const DiskCache cache = DiskCache::of(
      made_up_environment({{"TESSERA_CACHE_DIR", scratch.path().string()}, {"TESSERA_CACHE_BYTES", "3500"}}));
  const auto age = [&](const std::string& name, long seconds) {
    const timeval then{::time(nullptr) - seconds, 0};
    const std::array<timeval, 2> times = {then, then};
    ASSERT_EQ(::utimes(cache.path_of(key_of(name)).c_str(), times.data()), 0);
  };
  cache.write(key_of("old"), made_up_cubin(1000));
  cache.write(key_of("older, but read"), made_up_cubin(1000));
  age("old", 100);
  age("older, but read", 200);
  EXPECT_TRUE(cache.read(key_of("older, but read")));
  cache.write(key_of("new"), made_up_cubin(1000));
  EXPECT_TRUE(cache.read(key_of("old")));
  age("old", 100);
  cache.write(key_of("newest"), made_up_cubin(1000));
  EXPECT_FALSE(cache.read(key_of("old")));
  for (const char* name : {"older, but read", "new", "newest"}) EXPECT_TRUE(cache.read(key_of(name))) << name;

  cache.write(key_of("too large"), made_up_cubin(4000));
  EXPECT_FALSE(cache.read(key_of("too large")));
  EXPECT_TRUE(cache.read(key_of("newest"))) << "what never fits drives nothing out";
}

TEST(DiskCache, RemovesTemporaryFilesOfDeadProcesses) {
  const Scratch scratch;
  const DiskCache cache(scratch.path(), DiskCache::default_bytes);
  cache.write(key_of("a"), made_up_cubin(10));
  write_text(cache.folder() / "new-1-0", "left by a dead process");
  write_text(cache.folder() / "new-2-0", "being written");
  const timeval then{::time(nullptr) - 7200, 0};
  const std::array<timeval, 2> times = {then, then};
  ASSERT_EQ(::utimes((cache.folder() / "new-1-0").c_str(), times.data()), 0);
  cache.write(key_of("b"), made_up_cubin(10));
  EXPECT_FALSE(std::filesystem::exists(cache.folder() / "new-1-0"));
  EXPECT_TRUE(std::filesystem::exists(cache.folder() / "new-2-0"));
}

TEST(DiskCache, ALockIsHeldByOneAndGivenUpWithIt) {
  const Scratch scratch;
  const DiskCache cache(scratch.path(), DiskCache::default_bytes);
  {
    const File first = cache.lock(key_of("a"));
    EXPECT_TRUE(first.is_open());
    EXPECT_FALSE(cache.lock(key_of("a"), 0.05).is_open());
    EXPECT_TRUE(cache.lock(key_of("something else"), 0.05).is_open());
  }
  EXPECT_TRUE(cache.lock(key_of("a"), 0.05).is_open());
}

TEST(DiskCache, ReadsLargeEntriesInTime) {
  const Scratch scratch;
  const DiskCache cache(scratch.path(), DiskCache::default_bytes);
  cache.write(key_of("a"), made_up_cubin(300'000));  // a large kernel
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    ASSERT_TRUE(cache.read(key_of("a")));
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  RecordProperty("milliseconds", std::to_string(1e3 * best));
  EXPECT_LT(best, 0.030);
}

}  // namespace
}  // namespace tessera::cuda
