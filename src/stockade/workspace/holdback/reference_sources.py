"""Which obeyed files are read for the names of others, tool by tool, and which are not, and why.

Every entry of `policy/holdback_table.OBEYED` is here: a file of it in `SOURCES`, or its first pattern in
`NOT_FOLLOWED`. Patterns are as in the table, but `*` stays within one name, and there is no `**`.
"""

from __future__ import annotations

#: The files to read, by the parser for them. `references.KINDS` has the parsers.
SOURCES: dict[str, str] = {
    "imports": (
        "{CLAUDE,CLAUDE.local,AGENTS,AGENTS.override,AGENTS.local,AGENT,GEMINI,QWEN,CRUSH,OPENCODE,WARP}.md "
        "{JULES,IFLOW,CODEBUDDY,HERMES,AMP,codex,CODEX,replit,knowledge}.md skills/*/SKILL.md .agentrules "
        ".claude/CLAUDE.md .claude/{commands,agents,rules}/*.md .claude/skills/*/SKILL.md "
        ".github/copilot-instructions.md .github/{instructions,prompts,agents,chatmodes}/*.md .cursorrules "
        ".cursor/{rules,commands}/*.{md,mdc} .agents/*.md .agents/skills/*/SKILL.md .rules .codex/*.md "
        ".gemini/*.md .qwen/*.md .windsurfrules .windsurf/{rules,workflows}/*.md .clinerules "
        ".clinerules/*.md .roorules .roo/rules*/*.md .kilocoderules .kilocode/rules/*.md .continuerules "
        ".continue/rules/*.md .amazonq/rules/*.md .kiro/steering/*.md .opencode/*/*.md .goosehints "
        ".augment-guidelines .junie/guidelines.md .trae/rules/*.md .bob/rules/*.md .openhands_instructions "
        ".openhands/microagents/*.md .factory/*/*.md"
    ),
    "shell": (
        ".envrc .envrc.* .direnvrc .config/direnv/direnvrc .config/direnv/lib/*.sh .env.leave .autoenv "
        ".autoenv.zsh .ondirrc .rvmrc .powrc .huskyrc "
        ".bashrc "
        ".bash_profile .bash_login .bash_logout .bash_aliases .bashrc.local .bashrc.d/* .profile .zshrc "
        ".zshenv .zprofile .zlogin .zlogout .zshrc.local .config/zsh/* .kshrc .mkshrc .shrc .shinit "
        ".config/fish/config.fish .config/fish/conf.d/* .xinitrc .xsession .xsessionrc .xprofile "
        "etc/conda/activate.d/*"
    ),
    "hook": (
        ".husky/* .git/hooks/* .{githooks,git-hooks,git_hooks,hooks}/* {githooks,git-hooks,git_hooks}/* "
        ".lefthook/*/*"
    ),
    "json": (
        ".claude/settings{,.local}.json .claude.json .claude-plugin/plugin.json .mcp.json .mcp/*.json "
        "mcp.json mcp_config.json {,.}lsp.json claude_desktop_config.json "
        ".cursor/{mcp,hooks,environment}.json .vscode/{mcp,settings,tasks}.json *.code-workspace "
        ".github/hooks/*.json .github/lsp.json .gemini/settings.json .qwen/settings.json .codex/hooks.json "
        ".windsurf/*.json .roo/mcp.json .kilocode/mcp.json kilo.json{,c} .continue/*.json .amazonq/*.json "
        ".amazonq/cli-agents/*.json .kiro/settings/*.json opencode.json{,c} .opencode.json{,c} "
        ".opencode/*.json{,c} {,.}crush.json .crush/*.json .agents/*.json hooks/hooks.json .cline/*.json "
        ".factory/*.json .junie/mcp/*.json .augment/*.json .amp/*.json .trae/mcp.json .iflow/settings.json "
        ".codebuddy/settings.json .refact/*.json conductor.json .emdash.json .container-use/*.json "
        ".devcontainer/devcontainer.json .devcontainer/*/devcontainer.json .devcontainer.json "
        "devcontainer.json .zed/*.json *.sublime-project .luarc.json{,c} {,.}rust-project.json "
        ".phpactor.json .bsp/*.json coc-settings.json .neoconf.json .codesandbox/tasks.json"
    ),
    "toml": (
        ".codex/config.toml {,.}mise{,.local,.*}.toml mise/config{,.local}.toml .config/mise/config.toml "
        ".config/mise.toml .mise/config.toml .helix/{config,languages}.toml .vibe/config.toml gptme.toml"
    ),
    "yaml": (
        ".pre-commit-config.y{,a}ml {,.,.config/}lefthook{,-local}.y{,a}ml .overcommit.yml "
        ".local-overcommit.yml grumphp.yml .trunk/trunk.yaml .lazygit.yml .git/lazygit.yml "
        ".config/lazygit/config.yml .aider.conf.y{,a}ml .continue/*.yaml .goose/*.yaml .gitpod.yml "
        "{,.}devfile.y{,a}ml .daytona.yaml {docker-,}compose.override.y{,a}ml .phpactor.yml hie.yaml "
        ".pkgx.y{,a}ml .refact/*.yaml .kube/config"
    ),
    "pipeline": (
        ".github/workflows/*.y{,a}ml .github/actions/*/action.y{,a}ml .{gitea,forgejo}/workflows/*.y{,a}ml "
        ".gitlab-ci.y{,a}ml *.gitlab-ci.y{,a}ml .gitlab-ci/*.y{,a}ml .gitlab/ci/*.y{,a}ml "
        "azure-pipelines{,-*,.*}.y{,a}ml .azure-pipelines/*.y{,a}ml .woodpecker.y{,a}ml "
        ".woodpecker/*.y{,a}ml .circleci/config.yml bitbucket-pipelines.yml Jenkinsfile Jenkinsfile.* "
        "*.jenkinsfile {,.}zuul.yaml {,.}zuul.d/*.yaml"
    ),
    "words": (
        # Hook managers
        ".lintstagedrc .lintstagedrc.* lint-staged.config.* {,.}simple-git-hooks.{js,cjs,mjs,json} "
        "{,.}hk.pkl hk.local.pkl captainhook.json .rusty-hook.toml cog.toml "
        "{,.}nano-staged.{js,cjs,mjs,json} prek.toml .prek.toml {,.}lefthook.{toml,json} "
        # Version control
        ".subversion/config .bzr/branch/branch.conf _darcs/prefs/* .pijul/config _MTN/monotonerc .gclient "
        # Terminals, the desktop, your own configuration
        ".inputrc .lesskey .mailcap .tmux.conf .config/tmux/tmux.conf .screenrc .wezterm.lua "
        ".alacritty.{toml,yml} .config/{alacritty,kitty,wezterm,foot,ghostty}/* "
        ".config/{autostart,sway,i3,hypr,bspwm,sxhkd,openbox,waybar}/* .config/systemd/user/* "
        ".local/share/applications/* .asoundrc .config/crontab .forward .procmailrc .muttrc .neomuttrc "
        ".msmtprc .ssh/config .gnupg/*.conf .curlrc .wgetrc .aws/config .docker/config.json .nanorc .ackrc "
        ".psqlrc .sqliterc .my.cnf .mongorc.js .mongoshrc.js .duckdbrc "
        # Toolchains
        ".python-version rust-toolchain{,.toml} .prototools .vfox.toml .cargo/config{,.toml} .config/go/env "
        ".npmrc .yarnrc .yarnrc.y{,a}ml {,.}bunfig.toml {,.}pnpmfile.{cjs,mjs,js} .mvn/*.{config,xml} "
        ".mavenrc .m2/settings.xml .sbtopts .jvmopts .sbtrc .mill-jvm-opts .mill-opts nuget.config "
        "dotnet-tools.json Directory.Build.rsp MSBuild.rsp {,user}.bazelrc tools/bazel.rc .buckconfig "
        ".buckconfig.local .plzconfig .pants.rc .gradle/init.gradle{,.kts} .gradle/gradle.properties "
        "CMakeUserPresets.json cmake-kits.json ansible.cfg .ansible.cfg local.properties pyvenv.cfg "
        "{.venv,venv,env}/pip.conf uv.toml poetry.toml {,.}pdm.toml invoke.{yaml,yml,json} .actrc "
        "override.tf *_override.tf "
        # Editors and language servers
        ".idea/{watcherTasks,startup,externalDependencies}.xml .idea/tools/*.xml .project .factorypath "
        ".externalToolBuilders/* omnisharp.json .tm_properties .kateproject .lite_project.lua .vimrc "
        ".gvimrc .vimrc.local .lvimrc .local.vimrc .exrc .nvimrc .nvim.lua .exrc.lua .lazy.lua "
        ".ycm_extra_conf.py .emacs .emacs.el .dir-locals.el .ropeproject/config.py .tern-project "
        "rust-analyzer.toml .merlin "
        # Languages' start-up files and debuggers
        ".pdbrc .pythonrc .pythonrc.py ipython_config.py sitecustomize.py usercustomize.py .irbrc .pryrc "
        ".gemrc .bundle/config .rspec .Rprofile .Renviron renv/activate.R .ghci .ocamlinit .utoprc .iex.exs "
        ".erlang .octaverc .gnuplot .tclshrc .perldb .swiplrc .guile startup.m {,.}rootlogon.C .rootrc "
        ".psysh.php .user.ini .htaccess php.ini .latexmkrc latexmkrc .gdbinit .gdbearlyinit .lldbinit "
        ".radare2rc .valgrindrc"
    ),
}  # fmt: skip

VERSION_CONTROL = (
    "the repository's own configuration: `workspace/version_control` reads it, with its includes, hooks and "
    "commands"
)
PROGRAMS = "programs, or an install with programs in it: what a program runs in turn is not followed"
CODE = "code of the project: what code loads in turn is not followed"
NO_FILES = "names addresses, versions, keys, people or patterns, and no file that it runs"
SERVICE = "a service obeys it, on its own machines: the scripts that it names are code of the project there"
OWN_RECORDS = "the tool's own records, which it writes itself"
#: By the first pattern of the entry: why its files are not read for the names of others.
NOT_FOLLOWED: dict[str, str] = {
    ".git": VERSION_CONTROL,
    ".git/**/config{,.worktree}": VERSION_CONTROL,
    ".git/**/{commondir,gitdir}": VERSION_CONTROL,
    ".git/{remotes,branches}/": NO_FILES,
    ".git/**/{rebase-merge,rebase-apply,sequencer}/": OWN_RECORDS,
    "git~1": VERSION_CONTROL,
    ".gitconfig": VERSION_CONTROL,
    ".hg/**/hgrc": VERSION_CONTROL,
    ".jj/repo": VERSION_CONTROL,
    ".sl/**/{config,hgrc,sharedpath,requires}": VERSION_CONTROL,
    ".lfsconfig": NO_FILES,
    ".fslckout": OWN_RECORDS,
    "CVS/Root": NO_FILES,
    ".p4config": NO_FILES,
    ".repo/": PROGRAMS,
    ".west/config": NO_FILES,
    ".dvc/config{,.local}": NO_FILES,
    ".directory": NO_FILES,
    ".local/bin/": PROGRAMS,
    ".sops.yaml": NO_FILES,
    ".nvm/": PROGRAMS,
    ".config/stockade/": "Stockade judges the paths in its policies itself",
    "stockade.toml": "Stockade judges the paths in its policies itself",
    ".env": "variables, which any program may take for anything; a file that a value names is not followed",
    "bin/hermit": PROGRAMS,
    "lean-toolchain": NO_FILES,
    "Assets/**/Editor/**": CODE,
    ".{cursor,cursorindexing,aider,gemini,qwen,claude,cline,roo,kilocode,codeium}ignore": NO_FILES,
    ".github/{settings,mergify,renovate,dependabot}.{yml,yaml,json,json5}": NO_FILES,
    ".coderabbit.y{,a}ml": NO_FILES,
    "CODEOWNERS": NO_FILES,
    "buildspec.y{,a}ml": SERVICE,
    "{.venv,venv,.virtualenv,virtualenv,.env,env,.tox/*,.nox/*}/{bin,Scripts}/": PROGRAMS,
    "{_opam,.nodeenv}/{bin,Scripts}/": PROGRAMS,
    "LocalValetDriver.php": CODE,
    "*.py{c,o}": PROGRAMS,
    "node_modules/.bin/": PROGRAMS,
    ".turbo/config.json": NO_FILES,
}
